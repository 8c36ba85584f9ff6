// The widget: a bar, the tree, the picture, the panels. All state of the session lives in the kernel.
const PANELS = { matches: matchesPanel, history: historyPanel, kept: keptPanel, details: detailsPanel, timeline: timelinePanel, files: reportPanel };
const TITLES = { matches: "Matches", history: "History", kept: "Kept", details: "Details", timeline: "Time", files: "Results" };

const NEIGHBORS = 16; // boxes above which a jump leaves the neighbors out

class Desk {
  constructor(model, root) {
    Object.assign(this, {
      model, root, panel: "matches", overlay: "phase", chosen: new Set(), edited: {}, path: "steps.json", drawn: -1,
      preview: null, unfolded: null, details: null, code: null, report: "", focused: null, partial: {}, grouped: new Map(),
      drawnAfter: false,
    });
    this.channel = new Channel(model, {
      working: (what) => this.working(what || this.state.opening), progress: (message) => this.progressed(message), failed: (why) => this.say(why, true), heard: () => this.say("", false, true),
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
    this.search = element("input", { type: "search", class: "search", "aria-label": "search modules and operators", placeholder: "search   /", oninput: () => this.find() });
    this.found = element("div", { class: "found" });
    this.overlays = element("select", { class: "overlay", title: "colors", "aria-label": "colors", onchange: (event) => { this.overlay = event.target.value; this.colors(); } },
      [["phase", "color: phase"], ["bytes", "color: bytes moved"], ["time", "color: measured time"], ["none", "no color"]]
        .map(([value, label]) => element("option", { value }, label)));
    this.legend = element("span", { class: "legend" });
    this.totals = element("span", { class: "totals" });
    this.progress = element("span", { class: "progress", role: "status" });
    this.meter = element("progress", { "aria-label": "progress" });
    this.message = element("div", { class: "message", role: "alert" });
    this.frame = element("iframe", { title: "the graph" });
    this.change = element("div", { class: "change", role: "group", "aria-label": "preview in the picture" });
    this.placeholder = element("div", { class: "placeholder soft" });
    this.crumbs = element("nav", { class: "crumbs", "aria-label": "where the chosen box is" });
    this.left = element("div", { class: "left" });
    this.tabs = element("div", { class: "tabs", role: "tablist", "aria-label": "panels" });
    this.body = element("div", { class: "body", role: "tabpanel", tabindex: "0" });
    const check = (type) => () => {
      this.partial = {};
      this.turn("files");
      ask(type)().then(() => { this.partial = {}; this.side(); });
    };
    this.root.append(
      element("div", { class: "bar" }, this.undo, this.redo,
        this.verify = button("Verify", "verify", "outputs and gradients against PyTorch: v", check("verify")),
        this.measure = button("Measure", "measure", "time before and now: m", check("measure")),
        button("Fit", "fit", "f", () => this.viewer?.fit()),
        button("Full screen", "full", "the whole screen, and back", () => this.full()), this.overlays, this.legend,
        element("span", { class: "finder" }, this.search, this.found), this.totals),
      this.message,
      element("div", { class: "main" }, this.left, element("div", { class: "picture" }, this.frame, this.placeholder, this.change, this.crumbs),
        element("div", { class: "side" }, this.tabs, this.body)),
      element("div", { class: "status" }, this.cancel, this.meter, this.progress));
    this.root.tabIndex = -1;
    this.root.setAttribute("role", "region");
    this.root.setAttribute("aria-label", "training graph explorer");
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
    if (this.preview && !this.preview.id.startsWith(`${this.state.version}:`)) this.forget();
    this.bar(); this.tree(); this.mark(); this.side(); this.opening();
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

  // What is drawn: the present graph, or the one after what is previewed.
  get picture() {
    const after = this.drawnAfter && this.preview?.made.after;
    return after ? { sdfg: after.sdfg, view: after } : this.state;
  }

  async drawNow() {
    const text = JSON.stringify(this.picture.sdfg);
    if (!this.picture.sdfg || !this.viewer?.window || text === this.drawn) { this.colors(); return; }
    this.drawn = text;
    this.boxes = new Map(this.picture.view.boxes.map((box) => [box.key, box]));
    const began = performance.now();
    await this.viewer.show(text);
    this.placeholder.textContent = "";
    this.root.dataset.drawn = String(this.state.view.boxes.length);
    this.root.dataset.layout = (performance.now() - began).toFixed(0);
    this.colors();
  }

  colors() {
    const { view } = this.picture;
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
    if (this.viewer) {
      this.viewer.paint = paints[this.overlay];
      const made = this.preview?.made;
      this.viewer.gone = new Set(this.drawnAfter ? [] : made?.keys ?? []);
      this.viewer.come = new Set(this.drawnAfter ? made?.after?.keys ?? [] : []);
      this.viewer.choose(this.chosen);
    }
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

  // The preview in the picture: before, with what goes, or after, with what comes.
  changing() {
    const made = this.preview?.made;
    if (!made?.after) { this.change.replaceChildren(); return; }
    const side = (label, after) => element("button", { class: label.toLowerCase(), "aria-pressed": String(this.drawnAfter === after),
      onclick: () => { this.drawnAfter = after; this.changing(); this.draw().then(() => this.viewer?.fit(after ? made.after.keys : made.keys)); } }, label);
    const [, before, after] = made.rows[0];
    this.change.replaceChildren(
      side("Before", false), side("After", true),
      element("span", {}, `${made.text.split("(")[0]}: ${bytesText(before)} → ${bytesText(after)} `,
        element("b", { class: after < before ? "gain" : after > before ? "loss" : "soft" }, changeText(after - before))),
      element("span", { class: this.drawnAfter ? "comes" : "goes" }, this.drawnAfter ? `${made.new} new or changed` : `${made.gone} gone or changed`),
      element("button", { class: "forget", "aria-label": "close the preview", onclick: () => { this.forget(); this.side(); } }, "×"));
  }

  forget() { this.preview = null; this.drawnAfter = false; this.changing(); this.draw(); }

  full() {
    if (document.fullscreenElement) document.exitFullscreen();
    else this.root.requestFullscreen?.();
  }

  side() {
    this.body.setAttribute("aria-label", TITLES[this.panel]);
    this.tabs.replaceChildren(...Object.keys(PANELS).map((name) => element("button", {
      role: "tab", class: name, tabindex: name === this.panel ? "0" : "-1", onkeydown: (event) => this.tab(event), "aria-selected": String(name === this.panel), onclick: () => this.turn(name) },
      TITLES[name] + (name === "history" && this.state.at ? ` ${this.state.at}` : ""))));
    const at = this.body.scrollTop, held = this.body.contains(document.activeElement);
    this.body.replaceChildren(PANELS[this.panel](this));
    this.body.scrollTop = at;
    if (held) this.root.focus({ preventScroll: true }); // so that keys go on working
  }

  turn(name) { this.panel = name; this.side(); this.body.scrollTop = 0; }

  tab(event) {
    const names = Object.keys(PANELS), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    this.turn(names[(names.indexOf(this.panel) + step + names.length) % names.length]);
    this.tabs.querySelector("[aria-selected='true']").focus();
    event.preventDefault();
    event.stopPropagation();
  }

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

  // What a check does at the moment, and its first results.
  progressed({ kind, text, done, of, partial }) {
    this.at = { kind, text, done, of };
    this.tell?.();
    if (partial === undefined) return;
    this.partial = { ...this.partial, [kind]: partial };
    if (this.panel === "files") this.side();
  }

  working(what) {
    if (what && what === this.under) return;
    this.under = what;
    this.at = null;
    clearInterval(this.ticking);
    const began = Date.now();
    const tell = this.tell = () => {
      const seconds = Math.round((Date.now() - began) / 1000);
      const at = what && this.at?.kind === what ? `: ${this.at.text}` : "";
      this.progress.textContent = what ? `${what}${seconds ? ` ${seconds} s` : ""}${at || "…"}` : "";
      if (this.at?.of) { this.meter.max = this.at.of; this.meter.value = this.at.done; } else this.meter.removeAttribute("value");
    };
    tell();
    if (what) this.ticking = setInterval(tell, 500);
    this.root.classList.toggle("busy", Boolean(what));
    this.cancel.disabled = !what;
  }

  // ---- choosing ---------------------------------------------------------------------------------------------------
  light(keys) { this.viewer?.light(keys); }

  // Zoom to boxes and to what they read and what reads them, so that their place can be seen.
  jump(keys) {
    const wanted = new Set(keys), around = new Set(keys);
    for (const { source, target } of this.picture.view.edges) {
      if (wanted.has(source)) around.add(target);
      if (wanted.has(target)) around.add(source);
    }
    this.viewer?.fit(around.size <= NEIGHBORS ? [...around] : keys);
  }

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
    this.crumbs.replaceChildren(...breadcrumb(this));
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
      setTimeout(() => { this.jump(answer.keys); this.light(answer.keys); }, 200);
    }, () => {});
  }

  find() {
    const text = this.search.value;
    if (!text.trim()) { this.found.replaceChildren(); return; }
    this.channel.ask({ type: "search", text }).then((answer) => {
      this.found.replaceChildren(...answer.found.map((one) => element("button", { onclick: () => {
        this.found.replaceChildren();
        this.channel.ask({ type: "find", key: one.key }).then((found) => {
          this.pick(one.key);
          setTimeout(() => this.jump(found.keys), 200);
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
  previewed(id, made) {
    this.preview = { id, made };
    this.drawnAfter = false;
    this.unfolded = id;
    this.side();
    this.changing();
    this.draw().then(() => { if (made.keys?.length) this.viewer?.fit(made.keys); });
  }
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
      v: () => this.verify.click(), m: () => this.measure.click(), u: () => this.undo.click(), r: () => this.redo.click(), f: () => this.viewer?.fit(), "/": () => this.search.focus(),
      Escape: () => (this.cancel.disabled ? this.clearSelection() : this.cancel.click()),
      1: () => this.turn("matches"), 2: () => this.turn("history"), 3: () => this.turn("kept"),
      4: () => this.turn("details"), 5: () => this.turn("timeline"), 6: () => this.turn("files"),
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
