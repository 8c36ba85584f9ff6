// The one place that knows DaCe's viewer. It runs in a frame of its own, so that its styles and globals never touch the
// notebook; its source comes from the kernel, once per page.
const page = (globalThis.__daceml_train ??= {});

const unpacked = async (buffer) => {
  const bytes = new Uint8Array(buffer.buffer ?? buffer, buffer.byteOffset ?? 0, buffer.byteLength);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
};

const viewerSource = (ask) => {
  page.viewer ??= ask({ type: "viewer" }).then(({ buffers }) => unpacked(buffers[0]));
  page.viewer.catch(() => { page.viewer = null; });
  return page.viewer;
};

const FRAME = `<!doctype html><html class="sdfv" lang="en"><head><meta charset="utf-8"><title>the graph</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval';
style-src 'unsafe-inline'; img-src data: blob:; font-src data:"></head>
<body class="sdfv" style="margin:0;overflow:hidden;background:transparent"><div id="embedded"></div>
<div id="contents" style="display:none"></div><div id="view" style="position:absolute;inset:0;overflow:hidden"></div>
</body></html>`;

const DARK = {
  "--state-background-color": "#20262b", "--state-foreground-color": "#c5ccd2", "--node-background-color": "#2d353c",
  "--node-foreground-color": "#e8ecef", "--color-default": "#9aa6b0", "--connector-unscoped-color": "#4b6572",
  "--connector-scoped-color": "#4b6572", "--node-missing-background-color": "#2d353c",
};
const LIGHT = { "--state-background-color": "#f6f8fa" };
const PHASE_COLOURS = { forward: "#0072b2", backward: "#d98200", update: "#009e73" };

class Viewer {
  constructor(frame, events) {
    Object.assign(this, { frame, events, renderer: null, lit: new Set(), chosen: new Set(), gone: new Set(), come: new Set(), paint: () => null });
  }

  async start(source, dark) {
    await new Promise((ready) => { this.frame.onload = ready; this.frame.srcdoc = FRAME; });
    this.window = this.frame.contentWindow;
    this.dark = dark;
    const script = this.frame.contentDocument.createElement("script");
    script.textContent = source;
    this.frame.contentDocument.head.append(script);
    if (!this.window.SDFGRenderer) throw new Error("DaCe's viewer did not load");
  }

  theme(dark) {
    this.dark = dark;
    const style = this.renderer?.get_canvas()?.style;
    if (!style) return;
    for (const name of Object.keys(DARK)) style.removeProperty(name);
    for (const [name, value] of Object.entries(dark ? DARK : LIGHT)) style.setProperty(name, value);
    this.redraw();
  }

  async show(json) {
    const sdfg = this.window.checkCompatLoad(this.window.parse_sdfg(json));
    if (this.renderer) {
      await this.renderer.setSDFG(sdfg, true);
    } else {
      const place = this.frame.contentDocument.getElementById("view");
      this.renderer = new this.window.SDFGRenderer(sdfg, place, undefined, null, null, false, null, null, []);
      // The widget draws labels at every zoom and opens groups: the viewer would hide and unfold by its own rules.
      Object.defineProperty(this.renderer, "_adaptiveHiding", { get: () => false, set: () => {} });
      this.renderer.toggle_element_collapse = () => false;
      await new Promise((next) => setTimeout(next, 0));
      this.renderer.overlayManager.register_overlay(this.overlay());
      this.map();
      this.renderer.on("selection_changed", () => this.events.select(this.selected()));
    }
    this.theme(this.dark);
    this.fit();
  }

  // A small picture of the whole graph with the part in sight; a click goes there.
  map() {
    const { renderer } = this;
    if (!renderer.enableMinimap || !renderer.draw_minimap) return;
    renderer.enableMinimap();
    const canvas = renderer.minimap_canvas, draw = renderer.draw_minimap.bind(renderer);
    canvas.style.cssText += "position:absolute;top:auto;left:auto;right:8px;bottom:8px;border:1px solid #8a949c;cursor:pointer;";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "the whole graph");
    renderer.draw_minimap = () => {
      canvas.style.backgroundColor = this.dark ? "#171b1e" : "#ffffff";
      renderer.clear_minimap();
      draw();
      this.boxes();
    };
  }

  boxes() {
    const { renderer } = this, { minX, maxX, minY, maxY } = renderer.minimapBounds ?? {};
    const context = renderer.minimap_ctx, scale = renderer.minimap_canvas.width / (maxX - minX);
    if (!Number.isFinite(scale)) return;
    const sight = renderer.visible_rect;
    let inSight = Boolean(sight);
    context.save();
    context.setTransform(scale, 0, 0, scale, -minX * scale, -minY * scale);
    renderer.doForAllGraphElements((group, _info, drawn) => {
      const key = this.key(drawn);
      if (!key || key === "state" || key === "sdfg" || group === "edges" || !drawn.width) return;
      const { x, y } = drawn.topleft();
      context.fillStyle = this.chosen.has(key) ? "#8a4fd3" : this.lit.has(key) ? "#ffb000" : this.paint(key, false) ?? "#8a949c";
      inSight &&= x >= sight.x && y >= sight.y && x + drawn.width <= sight.x + sight.w && y + drawn.height <= sight.y + sight.h;
      context.fillRect(x, y, Math.max(drawn.width, 2 / scale), Math.max(drawn.height, 2 / scale));
    });
    // Where all boxes are in sight, the map would only hide some of them.
    renderer.minimap_canvas.style.visibility = inSight ? "hidden" : "visible";
    context.strokeStyle = this.dark ? "#ff8a80" : "#b3261e";
    context.lineWidth = 1.5 / scale;
    if (sight) context.strokeRect(sight.x, sight.y, sight.w, sight.h);
    context.restore();
  }

  overlay() {
    const viewer = this;
    return class extends this.window.GenericSdfgOverlay {
      static type = "BOTH";
      draw() {
        const { renderer } = viewer;
        renderer.doForVisibleElements((_group, _info, drawn) => viewer.color(drawn, renderer, renderer.get_context()));
      }
      refresh() {}
      on_mouse_event(kind, _event, _place, _elements, foreground) {
        const key = viewer.key(foreground);
        if (kind === "dblclick" && key) viewer.events.open(key);
        return false;
      }
    };
  }

  key(drawn) {
    return drawn?.data?.node?.attributes?.guid ?? drawn?.attributes?.()?.guid ?? null;
  }

  color(drawn, renderer, context) {
    const key = this.key(drawn) ?? drawn?.data?.attributes?.guid;
    if (!key || key === "state" || key === "sdfg") return;
    const edge = drawn.data?.attributes?.volume !== undefined;
    const painted = this.paint(key, edge);
    if (painted) drawn.shade(renderer, context, painted, edge ? 0.8 : 0.35);
    if (this.chosen.has(key)) this.mark(drawn, renderer, context, "#8a4fd3", edge);
    if (this.gone.has(key)) this.mark(drawn, renderer, context, "#c4421a", edge, [10, 6]);
    if (this.come.has(key)) this.mark(drawn, renderer, context, "#009e73", edge);
    if (this.lit.has(key)) this.mark(drawn, renderer, context, "#ffb000", edge);
  }

  // A frame around a box, so that its text stays legible.
  mark(drawn, renderer, context, color, edge, dashes = []) {
    if (edge) { drawn.shade(renderer, context, color, 0.9); return; }
    const { x, y } = drawn.topleft();
    context.save();
    context.strokeStyle = color;
    context.lineWidth = 4;
    context.setLineDash(dashes);
    context.strokeRect(x - 3, y - 3, drawn.width + 6, drawn.height + 6);
    context.restore();
  }

  selected() {
    return (this.renderer?.get_selected_elements() ?? []).map((drawn) => this.key(drawn)).filter(Boolean);
  }

  light(keys) { this.lit = new Set(keys); this.redraw(); }
  choose(keys) { this.chosen = new Set(keys); this.redraw(); }
  redraw() { this.renderer?.draw_async(); }

  fit(keys) {
    if (!this.renderer) return;
    const wanted = new Set(keys ?? []), found = [];
    if (wanted.size) this.renderer.doForAllGraphElements((_g, _i, drawn) => { if (wanted.has(this.key(drawn))) found.push(drawn); });
    this.renderer.zoom_to_view(found.length ? found : undefined);
    this.redraw();
  }

  resize() { this.renderer?.onresize?.(); this.redraw(); }
  destroy() { this.renderer?.destroy?.(); }
}
