// A stand-in for Worker on pages that are opened from a disk, where browsers refuse workers: the script of the search
// runs in a hidden frame instead. The plugin "offline" of the theme leaves out its own one, which is on another host,
// as this file has its name.
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = frame.contentDocument.createElement("script");
      this.started = new Promise((resolve) => (script.onload = resolve));
      script.src = address;
      frame.contentDocument.body.append(script);
    }

    // Messages that are sent before the script runs wait for it.
    postMessage(data) {
      this.started.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
