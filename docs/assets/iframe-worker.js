// Browsers start no worker for a page that was opened from a folder (file://). The worker of the search then runs
// in a hidden frame of the page.
if (location.protocol === "file:") {
  const loaded = (frame, address) =>
    new Promise((resolve) => {
      const script = frame.contentDocument.createElement("script");
      script.src = address;
      script.onload = resolve;
      frame.contentDocument.body.append(script);
    });
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...addresses) => {
        for (const each of addresses) await loaded(this.frame, each);
      };
      this.ready = loaded(this.frame, new URL(address, location.href).href);
    }
    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
