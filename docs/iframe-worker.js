// Search from a disk. The site's search runs in a Worker, which browsers refuse to pages opened as
// file://. There, and only there, the same script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      // What the script posts comes out here as a message of this worker.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = () => {};
      const script = inside.document.createElement("script");
      this.ready = new Promise((loaded) => (script.onload = loaded));
      this.inside = inside;
      script.src = url;
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
