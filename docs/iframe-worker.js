// The theme searches in a worker, and browsers start none for a page on a disk: there its script runs in a frame.
// Material's plugin `offline` loads such a stand-in from the network unless `polyfills` has a file of this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      window.addEventListener("message", ({ source, data }) => {
        if (source === this.inside) this.dispatchEvent(new MessageEvent("message", { data }));
      });
      const page = this.inside.document;
      page.open();
      page.write('<script>postMessage = (data) => parent.postMessage(data, "*")</script>');
      page.write(`<script src="${url}"></script>`);
      page.close();
      this.ready = new Promise((done) => this.inside.addEventListener("load", done));
    }

    async postMessage(data) {
      await this.ready;
      this.inside.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    }
  };
}
