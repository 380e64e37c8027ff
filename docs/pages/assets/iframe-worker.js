// SPDX-License-Identifier: Apache-2.0
// The site's search runs in a worker. Browsers start no worker for a page from disk, so there a frame stands in for it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inner = this.#frame.contentWindow;
      inner.document.open();
      inner.document.close();
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      this.#loaded = new Promise((resolve) => script.addEventListener("load", resolve));
      script.src = new URL(url, document.baseURI);
      inner.document.documentElement.append(script);
    }

    postMessage(data) {
      this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
