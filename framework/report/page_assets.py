"""The style and the script of the report's page.

The style is light or dark by the reader's preference, and fits narrow screens. The script shows values under the
pointer and makes buttons copy; the page is complete without it.
"""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--edge:#e3e6eb;--text:#1b2029;--soft:#5f6b7a;--faint:#eef0f4;
--accent:#2f6fed;--good:#17804f;--goodbg:#e2f5ea;--bad:#c0322b;--badbg:#fde9e7;--warn:#9a6100;--warnbg:#fdf1d8;
--c0:#2f6fed;--c1:#e8710a;--c2:#16966b;--c3:#a142f4;--c4:#d0377f;--c5:#7a8290}
@media(prefers-color-scheme:dark){:root{--bg:#0f1217;--card:#171b22;--edge:#2a303a;--text:#e7eaef;--soft:#98a3b3;
--faint:#20262f;--accent:#7aa7ff;--good:#5fd39a;--goodbg:#12301f;--bad:#ff8f85;--badbg:#3a1917;--warn:#f0bd62;
--warnbg:#33260c;--c0:#7aa7ff;--c1:#ffa657;--c2:#56d4a5;--c3:#c99bff;--c4:#ff85b8;--c5:#9aa4b2}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-font-smoothing:antialiased}
main{max-width:1200px;margin:0 auto;padding:36px 24px 56px}
h1{font-size:27px;line-height:1.2;margin:0;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:13px;margin:36px 0 12px;color:var(--soft);font-weight:600;letter-spacing:.06em;text-transform:uppercase}
h3{font-size:14px;margin:0;font-weight:600;overflow-wrap:anywhere}
code,pre,.mono{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.head{display:flex;flex-wrap:wrap;gap:10px 14px;align-items:center}
.pill{font-size:13px;font-weight:600;padding:3px 11px;border-radius:99px;background:var(--faint);color:var(--soft)}
.pill.good{background:var(--goodbg);color:var(--good)}.pill.bad{background:var(--badbg);color:var(--bad)}
.pill.warn{background:var(--warnbg);color:var(--warn)}
.why{font-size:17px;margin:12px 0 0;max-width:86ch;overflow-wrap:anywhere}
.soft{color:var(--soft)}.small{font-size:13px}
.card{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:16px 18px;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:24px}
.tile b{display:block;font-size:22px;font-weight:600;letter-spacing:-.02em;line-height:1.3;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{font-size:13px;color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));gap:14px}
.charts:not(.three) .chartbox:only-child{max-width:760px}
.charts+.charts{margin-top:14px}.charts:empty{display:none}
.charts.three{grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr))}
.cols{columns:2 420px;column-gap:14px}section{padding-top:36px}section h2{margin-top:0}.cols section{break-inside:avoid}
.lead{margin:0 0 8px}
.chartbox{position:relative;padding:14px 16px 8px}
.chartbox header{display:flex;flex-wrap:wrap;gap:4px 16px;align-items:baseline;justify-content:space-between}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:6px;vertical-align:middle}
.legend b{color:var(--text);font-weight:600;font-variant-numeric:tabular-nums}
svg.chart{display:block;width:100%;height:auto;margin-top:6px;overflow:visible;touch-action:pan-y}
.grid{stroke:var(--edge);stroke-width:1}.tick{fill:var(--soft);font-size:11.5px;font-family:inherit}
.raw{opacity:.3;stroke-width:1!important}.line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.cursor{stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3;visibility:hidden}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}
.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}.dot.c4{fill:var(--c4)}
.dot.c5{fill:var(--c5)}
.b0{background:var(--c0)}.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}
.b4{background:var(--c4)}.b5{background:var(--c5)}
.tip{position:absolute;pointer-events:none;background:var(--card);border:1px solid var(--edge);border-radius:8px;
padding:6px 10px;font-size:12.5px;box-shadow:0 6px 20px #0003;white-space:nowrap;visibility:hidden;z-index:2;
font-variant-numeric:tabular-nums}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:500;color:var(--soft);text-align:left;font-size:13px}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--edge);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td,tr:last-child th{border-bottom:0}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:first-child,th:first-child{overflow-wrap:break-word}td:last-child,th:last-child{padding-right:0}
table.facts th{width:34%;min-width:112px}
.scroll{overflow-x:auto}
.cmd{display:flex;gap:10px;align-items:center;margin-top:14px;background:var(--card);border:1px solid var(--edge);
border-radius:10px;padding:9px 9px 9px 14px;max-width:860px}
.cmd code{flex:1;overflow-x:auto;white-space:pre}
.cmd button{font:inherit;font-size:13px;border:1px solid var(--edge);background:var(--faint);color:var(--text);
border-radius:7px;padding:3px 11px;cursor:pointer}
pre{margin:12px 0 0;padding:14px 16px;background:var(--card);border:1px solid var(--edge);border-radius:10px;
overflow-x:auto;max-height:420px}
details summary{cursor:pointer;color:var(--soft);font-size:14px;margin-top:14px}
.bar{display:flex;height:14px;border-radius:7px;overflow:hidden;background:var(--faint);margin:6px 0 4px}
.bar i{display:block;height:100%;min-width:2px}.bar .gap{background:repeating-linear-gradient(135deg,var(--edge) 0 4px,
transparent 4px 8px)}.bar .lost{background:var(--bad);opacity:.75}.bar .done{background:var(--c2)}
ul.plain{margin:0;padding:0 0 0 18px}ul.plain li{margin:4px 0;overflow-wrap:anywhere}
footer{margin-top:40px;color:var(--soft);font-size:13px}
@media(max-width:640px){main{padding:22px 14px 40px}h1{font-size:22px}.why{font-size:16px}.card{padding:13px 14px}
.tiles{grid-template-columns:repeat(2,1fr)}.chartbox{padding:12px 12px 6px}.wide .tick{font-size:15px}}
@media print{body{background:#fff}.cmd button{display:none}.card{break-inside:avoid}}
""".strip()

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
