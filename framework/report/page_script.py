"""The script of the report's page: values under the pointer, and buttons that copy. The page is complete without it."""

from __future__ import annotations

SCRIPT = """
(()=>{
const text=(v,b)=>{if(b){for(const u of["B","KB","MB","GB"]){if(Math.abs(v)<1000)return v.toPrecision(3)+" "+u;v/=1000}
return v.toPrecision(3)+" TB"}return String(+v.toPrecision(5))};
const nearest=(xs,x)=>{let a=0,b=xs.length-1;while(b-a>1){const m=(a+b)>>1;if(xs[m]<=x)a=m;else b=m}
return Math.abs(xs[a]-x)<=Math.abs(xs[b]-x)?a:b};
for(const svg of document.querySelectorAll("svg[data-chart]")){
 const d=JSON.parse(svg.dataset.chart),[x0,x1]=d.box,cursor=svg.querySelector(".cursor"),box=svg.parentElement;
 const tip=document.createElement("div");tip.className="tip";box.append(tip);
 const hide=()=>{tip.style.visibility=cursor.style.visibility="hidden"};
 svg.addEventListener("pointerleave",hide);
 svg.addEventListener("pointermove",e=>{
  const r=svg.getBoundingClientRect(),scale=r.width/svg.viewBox.baseVal.width,px=(e.clientX-r.left)/scale;
  if(px<x0-6||px>x1+6)return hide();
  const span=d.x[1]-d.x[0]||1,step=d.x[0]+(Math.min(Math.max(px,x0),x1)-x0)/(x1-x0)*span;
  tip.replaceChildren();let at=null;
  for(const l of d.lines){const i=nearest(l.x,step);if(at===null||Math.abs(l.x[i]-step)<Math.abs(at-step))at=l.x[i]}
  const head=document.createElement("div");head.textContent="step "+at.toLocaleString("en");head.style.fontWeight=600;
  tip.append(head);
  for(const l of d.lines){const i=nearest(l.x,at),row=document.createElement("div"),mark=document.createElement("i");
   mark.className="b"+l.color;mark.style.cssText="display:inline-block;width:10px;height:3px;margin-right:6px";
   row.append(mark,l.label+"  "+text(l.y[i],d.bytes)+(l.x[i]===at?"":"  (step "+l.x[i].toLocaleString("en")+")"));
   tip.append(row)}
  const cx=x0+(at-d.x[0])/span*(x1-x0);cursor.setAttribute("x1",cx);cursor.setAttribute("x2",cx);
  const left=cx*scale+r.left-box.getBoundingClientRect().left,w=tip.offsetWidth;
  tip.style.left=(left+14+w>box.clientWidth?Math.max(4,left-w-14):left+14)+"px";
  tip.style.top=(r.top-box.getBoundingClientRect().top+16)+"px";
  tip.style.visibility=cursor.style.visibility="visible";
 })}
for(const button of document.querySelectorAll("button[data-copy]")){button.hidden=!navigator.clipboard;
 button.addEventListener("click",()=>navigator.clipboard.writeText(button.dataset.copy).then(()=>{
  button.textContent="copied";setTimeout(()=>button.textContent="copy",1500)}))}
})();
""".strip()
