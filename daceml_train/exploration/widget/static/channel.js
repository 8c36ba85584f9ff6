// Requests to the kernel and their answers. A kernel that was restarted does not answer: then the channel reports it.
const WORDS = { viewer: "loading the viewer", code: "generating code", export: "writing HTML" };
const SILENCE = 5000; // milliseconds until a request that nobody took up is reported

class Channel {
  constructor(model, events) {
    Object.assign(this, { model, events, waiting: new Map(), next: 1, me: Math.random().toString(36).slice(2) });
    this.listener = (message, buffers) => this.heard(message, buffers);
    model.on("msg:custom", this.listener);
  }

  ask(request) {
    const id = `${this.me}:${this.next++}`;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => this.events.silent(), SILENCE);
      this.waiting.set(id, { resolve, reject, timer, kind: request.type });
      this.events.working(this.doing());
      try {
        this.model.send({ ...request, id });
      } catch (error) {
        this.events.silent();
      }
    });
  }

  heard(message, buffers) {
    if (message.type === "begun") {
      const begun = this.waiting.get(message.id);
      if (begun) clearTimeout(begun.timer);
      if (message.id === null) this.listing = true;
      this.events.heard();
      this.events.working(this.doing());
      return;
    }
    if (message.type === "progress") {
      if (this.waiting.has(message.id)) { this.events.heard(); this.events.progress(message); }
      return;
    }
    if (message.type !== "answer") return;
    if (message.id === null) {
      this.listing = false;
      if (message.error) this.events.failed(message.error);
    }
    const asked = this.waiting.get(message.id);
    if (asked) {
      clearTimeout(asked.timer);
      this.waiting.delete(message.id);
      this.events.heard();
      if (message.error) { this.events.failed(message.error); asked.reject(new Error(message.error)); }
      else asked.resolve({ ...message, buffers });
    }
    this.events.working(this.doing());
  }

  doing() {
    const kinds = [...this.waiting.values()].map((asked) => asked.kind).filter((kind) => kind !== "cancel");
    return WORDS[kinds[0]] ?? kinds[0] ?? (this.listing ? "listing matches" : "");
  }

  close() { this.model.off("msg:custom", this.listener); }
}
