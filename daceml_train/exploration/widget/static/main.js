// The widget: a bar, the tree, the picture, the panels. All state of the session lives in the kernel.
const PANELS = { matches: matchesPanel, history: historyPanel, kept: keptPanel, details: detailsPanel, files: reportPanel };
const TITLES = { matches: "Matches", history: "History", kept: "Kept", details: "Details", files: "Files" };

class Desk {
  constructor(model, root) {
    Object.assign(this, {
      model, root, panel: "matches", overlay: "phase", chosen: new Set(), edited: {}, path: "steps.json", drawn: -1,
      preview: null, unfolded: null, details: null, code: null, report: "", focused: null,
    });
    this.channel = new Channel(model, {
      working: (what) => this.working(what || this.state.opening), failed: (why) => this.say(why, true), heard: () => this.say("", false, true),
      silent: () => this.state.opening || this.say("The kernel does not answer: it is busy with a cell, or it was restarted. " +
        "After a restart, run the cell again. Nothing on the screen is lost until then.", true, true),
    });
    this.done = (answer) => { if (answer.report) this.report = answer.report; this.say(answer.note ?? ""); this.side(); };
    this.build();
  }

  get state() { return this.model.get("state"); }
  get filter() { return this.state.filter ?? {}; }

  build() {
    const button = (label, name, title, action) => element("button", { class: name, title, onclick: action }, label);
    const ask = (type, extra = {}) => () => this.channel.ask({ type, version: this.state.version, ...extra }).then(this.done, () => {});
    this.undo = button("Undo", "undo", "u", ask("undo"));
    this.redo = button("Redo", "redo", "r", ask("redo"));
    this.cancel = button("Cancel", "cancel", "Escape", () => this.channel.ask({ type: "cancel" }).catch(() => {}));
    this.search = element("input", { type: "search", class: "search", placeholder: "search   /", oninput: () => this.find() });
    this.found = element("div", { class: "found", role: "listbox" });
    this.overlays = element("select", { class: "overlay", title: "colors", onchange: (event) => { this.overlay = event.target.value; this.colors(); } },
      [["phase", "color: phase"], ["bytes", "color: bytes moved"], ["time", "color: measured time"], ["none", "no color"]]
        .map(([value, label]) => element("option", { value }, label)));
    this.legend = element("span", { class: "legend" });
    this.totals = element("span", { class: "totals" });
    this.progress = element("span", { class: "progress", role: "status" });
    this.message = element("div", { class: "message", role: "alert" });
    this.frame = element("iframe", { title: "the graph", tabindex: "-1" });
    this.placeholder = element("div", { class: "placeholder soft" });
    this.left = element("div", { class: "left" });
    this.tabs = element("div", { class: "tabs", role: "tablist" });
    this.body = element("div", { class: "body" });
    this.root.append(
      element("div", { class: "bar" }, this.undo, this.redo,
        button("Verify", "verify", "outputs and gradients against PyTorch", ask("verify")),
        button("Measure", "measure", "time before and now", ask("measure")),
        button("Fit", "fit", "f", () => this.viewer?.fit()), this.overlays, this.legend,
        element("span", { class: "finder" }, this.search, this.found), this.progress, this.cancel, this.totals),
      this.message,
      element("div", { class: "main" }, this.left, element("div", { class: "picture" }, this.frame, this.placeholder),
        element("div", { class: "side" }, this.tabs, this.body)));
    this.root.tabIndex = -1;
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.style.setProperty("--height", `${this.model.get("height")}px`);
  }

  async start() {
    this.theme();
    this.side();
    this.tree();
    this.bar();
    this.opening();
    this.viewer = new Viewer(this.frame, {
      select: (keys) => this.select(keys), open: (key) => this.channel.ask({ type: "open", key }).catch(() => {}),
    });
    try {
      await new Promise((next) => requestAnimationFrame(() => setTimeout(next, 0))); // the tree first
      await this.viewer.start(await viewerSource((request) => this.channel.ask(request)), this.dark);
      await this.draw();
    } catch (error) {
      this.say(`The picture cannot be drawn: ${error.message}. The tree and the lists work without it.`, true);
    }
    this.observer = new ResizeObserver(() => this.viewer.resize());
    this.observer.observe(this.frame);
    this.themes = new MutationObserver(() => this.theme());
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "class", "data-theme"] });
  }

  // During the capture the modules are shown, and the error if it fails.
  opening() {
    const { opening, failed } = this.state;
    if (failed) this.say(failed, true);
    this.placeholder.textContent = failed ? "There is no graph." : opening ? `${opening}… In the meantime: modules, and the bytes of their parameters.` : this.root.dataset.drawn ? "" : "drawing…";
    this.working(this.channel.doing() || opening);
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------
  async changed() {
    this.bar(); this.tree(); this.side(); this.opening();
    await this.draw();
  }

  // A layout blocks the page: of states that follow quickly, only the last is drawn.
  async draw() {
    this.again = true;
    if (this.drawing) return;
    this.drawing = true;
    try {
      while (this.again) {
        this.again = false;
        await new Promise((next) => setTimeout(next, 20));
        await this.drawNow();
      }
    } finally {
      this.drawing = false;
    }
  }

  async drawNow() {
    const text = JSON.stringify(this.state.sdfg);
    if (!this.state.sdfg || !this.viewer?.window || text === this.drawn) { this.colors(); return; }
    this.drawn = text;
    this.boxes = new Map(this.state.view.boxes.map((box) => [box.key, box]));
    const began = performance.now();
    await this.viewer.show(text);
    this.placeholder.textContent = "";
    this.root.dataset.drawn = String(this.state.view.boxes.length);
    this.root.dataset.layout = (performance.now() - began).toFixed(0);
    this.colors();
  }

  colors() {
    const { view } = this.state;
    this.boxes = new Map(view.boxes.map((box) => [box.key, box]));
    const edges = new Map(view.edges.map((edge) => [`${edge.source} ${edge.target}`, edge]));
    const most = (list, of) => list.reduce((largest, one) => Math.max(largest, of(one) ?? 0), 0);
    const heaviest = { bytes: most(view.boxes, (b) => b.bytes), time: most(view.boxes, (b) => b.seconds), edge: most(view.edges, (e) => e.bytes) };
    const paints = {
      none: () => null,
      phase: (key, edge) => (edge ? null : PHASE_COLOURS[this.boxes.get(key)?.phase]),
      bytes: (key, edge) => edge ? heat(edges.get(key)?.bytes, heaviest.edge) : heat(this.boxes.get(key)?.bytes, heaviest.bytes),
      time: (key, edge) => (edge ? null : heat(this.boxes.get(key)?.seconds, heaviest.time)),
    };
    if (this.viewer) { this.viewer.paint = paints[this.overlay]; this.viewer.choose(this.chosen); }
    const scale = (low, high) => [low, element("span", { class: "scale" }), high];
    const legends = {
      none: [], phase: Object.entries(PHASE_COLOURS).filter(([name]) => view.boxes.some((b) => b.phase === name))
        .map(([name]) => element("span", {}, element("span", { class: `dot ${name}` }), name)),
      bytes: scale(bytesText(heaviest.bytes / 1000), bytesText(heaviest.bytes)),
      time: heaviest.time ? scale(secondsText(heaviest.time / 1000), secondsText(heaviest.time)) : ["not measured yet: press Measure"],
    };
    this.legend.replaceChildren(...legends[this.overlay]);
  }

  bar() {
    const { totals, history, at } = this.state;
    this.undo.disabled = at === 0;
    this.redo.disabled = at === history.length;
    const saved = totals.start ? Math.round(1000 * (1 - totals.bytes / totals.start)) / 10 : 0;
    const part = (label, value, title) => element("span", { title }, element("b", { class: label }, value), ` ${label}`);
    this.totals.replaceChildren(
      part("moved", bytesText(totals.bytes), `at the start ${bytesText(totals.start)}`),
      saved ? element("span", { class: saved > 0 ? "gain" : "loss" }, `${saved > 0 ? "−" : "+"}${Math.abs(saved)} %`) : "",
      part("peak", bytesText(totals.peak), `at the start ${bytesText(totals.start_peak)}`),
      part("operators", String(totals.operators), flopsText(totals.flops)));
    if (this.state.version < 0) this.totals.replaceChildren();
  }

  tree() {
    const text = JSON.stringify(this.state.view.outline);
    if (text === this.rows) return; // the row under a double click must stay
    this.rows = text;
    const held = this.root.contains(document.activeElement) && document.activeElement.closest(".tree");
    const at = this.left.scrollTop;
    this.left.replaceChildren(outline(this));
    this.left.scrollTop = at;
    if (held) this.left.querySelector("[tabindex='0']")?.focus();
  }

  side() {
    this.tabs.replaceChildren(...Object.keys(PANELS).map((name) => element("button", {
      role: "tab", class: name, "aria-selected": String(name === this.panel), onclick: () => this.turn(name) },
      TITLES[name] + (name === "history" && this.state.at ? ` ${this.state.at}` : ""))));
    const at = this.body.scrollTop, held = this.body.contains(document.activeElement);
    this.body.replaceChildren(PANELS[this.panel](this));
    this.body.scrollTop = at;
    if (held) this.root.focus({ preventScroll: true }); // so that keys go on working
  }

  turn(name) { this.panel = name; this.side(); this.body.scrollTop = 0; }

  theme() {
    const light = document.body.dataset.jpThemeLight;
    this.dark = light !== undefined ? light === "false" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.root.classList.toggle("dark", this.dark);
    this.viewer?.theme(this.dark);
  }

  // ---- messages ---------------------------------------------------------------------------------------------------
  say(text, bad = false, silence = false) {
    if (silence && !text && !this.quiet) return;
    this.quiet = silence && Boolean(text);
    this.message.textContent = text;
    this.message.classList.toggle("bad", bad);
  }

  working(what) {
    if (what && what === this.under) return;
    this.under = what;
    clearInterval(this.ticking);
    const began = Date.now();
    const tell = () => {
      const seconds = Math.round((Date.now() - began) / 1000);
      this.progress.textContent = what ? `${what}${seconds ? ` ${seconds} s` : ""}…` : "";
    };
    tell();
    if (what) this.ticking = setInterval(tell, 500);
    this.root.classList.toggle("busy", Boolean(what));
    this.cancel.disabled = !what;
  }

  // ---- choosing ---------------------------------------------------------------------------------------------------
  light(keys) { this.viewer?.light(keys); }

  pick(key) {
    this.chosen = new Set([key]);
    this.select([key]);
  }

  select(keys) {
    this.chosen = new Set(keys);
    this.viewer?.choose(this.chosen);
    this.mark();
    this.narrow({ keys });
    if (keys.length === 1)
      this.channel.ask({ type: "details", key: keys[0] }).then((answer) => {
        this.details = answer.details;
        if (this.panel === "details") this.side();
      }, () => {});
  }

  mark() {
    for (const row of this.left.querySelectorAll(".row")) row.classList.toggle("chosen", this.chosen.has(row.dataset.key));
  }

  clearSelection() { this.chosen = new Set(); this.viewer?.choose([]); this.narrow({ keys: [] }); this.mark(); }

  narrow(change) {
    this.channel.ask({ type: "filter", ...this.filter, ...change }).catch(() => {});
  }

  toggle(row) {
    this.channel.ask({ type: row.open ? "close" : "open", key: row.key }).catch(() => {});
  }

  reveal(match) {
    const what = match.number === undefined ? { arrays: match.arrays } : { number: match.number, version: this.state.version };
    this.channel.ask({ type: "reveal", ...what }).then((answer) => {
      setTimeout(() => { this.viewer?.fit(answer.keys); this.light(answer.keys); }, 200);
    }, () => {});
  }

  find() {
    const text = this.search.value;
    if (!text.trim()) { this.found.replaceChildren(); return; }
    this.channel.ask({ type: "search", text }).then((answer) => {
      this.found.replaceChildren(...answer.found.map((one) => element("button", { role: "option", onclick: () => {
        this.found.replaceChildren();
        this.channel.ask({ type: "find", key: one.key }).then((found) => {
          this.pick(one.key);
          setTimeout(() => this.viewer?.fit(found.keys), 200);
        }, () => {});
      } }, element("span", { class: `dot ${one.phase}` }), one.label, element("small", {}, ` ${one.module}`))));
      if (!answer.found.length) this.found.replaceChildren(element("span", { class: "soft" }, "no such name"));
    }, () => {});
  }

  editing(id) {
    if (this.edited.id !== id) this.edited = { id, options: {} };
    return this.edited.options;
  }

  unfold(id) { this.unfolded = id; this.side(); }
  previewed(id, made) { this.preview = { id, made }; this.unfolded = id; this.side(); }
  askCode(key) {
    this.channel.ask({ type: "code", key }).then((answer) => { this.code = { key, text: answer.code }; this.side(); }, () => {});
  }

  key(event) {
    if (event.target.closest("input,select,textarea")) {
      if (event.key === "Escape") { this.found.replaceChildren(); event.target.blur(); this.root.focus(); }
      event.stopPropagation(); // the notebook has shortcuts of its own
      return;
    }
    const keys = {
      u: () => this.undo.click(), r: () => this.redo.click(), f: () => this.viewer?.fit(), "/": () => this.search.focus(),
      Escape: () => (this.cancel.disabled ? this.clearSelection() : this.cancel.click()),
      1: () => this.turn("matches"), 2: () => this.turn("history"), 3: () => this.turn("kept"),
      4: () => this.turn("details"), 5: () => this.turn("files"),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }

  close() {
    clearInterval(this.ticking);
    this.observer?.disconnect();
    this.themes?.disconnect();
    this.channel.close();
    this.viewer?.destroy();
  }
}

export default {
  async render({ model, el }) {
    const root = element("div", { class: "daceml-explore", "data-lm-suppress-shortcuts": "true" });
    el.append(root);
    const desk = new Desk(model, root);
    root.desk = desk; // for tests
    const changed = () => desk.changed();
    model.on("change:state", changed);
    desk.start();
    return () => { model.off("change:state", changed); desk.close(); };
  },
};
