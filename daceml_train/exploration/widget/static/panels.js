// The other panels: history, what gradients read, details of a box, files.
const historyPanel = (desk) => {
  const { history, at, totals, version } = desk.state;
  const jump = (number) => desk.channel.ask({ type: "jump", number, version }).catch(() => {});
  const rows = history.map((step) =>
    element("li", { class: step.number > at ? "undone" : step.number === at ? "now" : "", tabindex: "0",
      onclick: () => jump(step.number),
      onkeydown: (event) => { if (event.key === "Enter") jump(step.number); } },
      element("div", { class: "head" }, element("span", { class: "title" }, `${step.number}. ${step.text}`),
        element("span", { class: step.after < step.before ? "gain" : step.after > step.before ? "loss" : "soft" },
          step.after === step.before ? "±0 B" : changeText(step.after - step.before))),
      element("div", { class: "where" }, step.where || `${step.matches} matches`)));
  return element("div", {},
    element("p", { class: "soft" }, "Click a step to go to the state after it."),
    element("ol", { class: "steps" },
      element("li", { class: at === 0 ? "now" : "", tabindex: "0", onclick: () => jump(0),
        onkeydown: (event) => { if (event.key === "Enter") jump(0); } },
        `start: ${bytesText(totals.start)}`), rows),
    element("p", {}, `now ${bytesText(totals.bytes)}`));
};

const keptPanel = (desk) => {
  const { kept, version } = desk.state;
  const total = kept.filter((one) => !one.rematerialized).reduce((sum, one) => sum + one.bytes, 0);
  const cards = kept.map((one) =>
    element("div", { class: "card", tabindex: "0", role: "group", "aria-label": one.array, "data-array": one.array,
      onmouseenter: () => desk.light(one.keys), onmouseleave: () => desk.light([]),
      onfocus: () => desk.light(one.keys), onblur: () => desk.light([]) },
      element("div", { class: "head" }, element("span", { class: "title" }, one.array), element("span", {}, bytesText(one.bytes))),
      element("div", { class: "where" }, `${one.type} · produced by ${one.module || "the step"}: ${one.producer}`),
      element("div", { class: "soft" }, `read by ${one.gradients.join("; ")}`),
      element("div", { class: "buttons" },
        element("button", { onclick: () => desk.reveal({ arrays: [one.array], keys: one.keys }) }, "Show"),
        element("button", { class: "toggle", "aria-pressed": String(one.rematerialized), onclick: () =>
          desk.channel.ask({ type: one.rematerialized ? "keep" : "rematerialize", array: one.array, version }).then(desk.done, () => {}) },
          one.rematerialized ? "Keep" : "Rematerialize"))));
  return element("div", {},
    element("p", { class: "soft" }, `${kept.length} arrays of the forward pass are read after it, ${bytesText(total)} kept.`), cards);
};

const arrayRows = (label, arrays) => arrays.length
  ? [element("h4", {}, label), element("table", { class: "arrays" }, arrays.map((one) =>
      element("tr", {}, element("td", {}, one.path || one.name), element("td", {}, one.type), element("td", {}, bytesText(one.bytes)))))]
  : [];

const detailsPanel = (desk) => {
  const one = desk.details;
  if (!one) return element("p", { class: "soft" }, "Click a box of the picture or a row of the tree.");
  const known = [["bytes moved", bytesText(one.bytes)], ["arithmetic", one.flops ? flopsText(one.flops) : ""],
    ["measured", secondsText(one.seconds)], ["module", one.module], ["phase", one.phase],
    ["operators", one.operators > 1 ? String(one.operators) : ""]].filter(([, value]) => value);
  const source = one.source
    ? [element("h4", {}, `${one.source.file}:${one.source.line}`), element("pre", { class: "source" },
        one.source.lines.map((line, place) => element("span", {
          class: one.source.first + place === one.source.line ? "line here" : "line" }, `${one.source.first + place}  ${line}`)))]
    : one.lines?.length ? [element("h4", {}, "source"), element("p", {}, one.lines.join(", "))] : [];
  const code = one.code
    ? [element("h4", {}, "generated code"), desk.code?.key === one.key
        ? element("pre", { class: "code" }, desk.code.text)
        : element("button", { class: "code", onclick: () => desk.askCode(one.key) }, "C++")]
    : [];
  return element("div", { class: "details" },
    element("h3", {}, one.label),
    element("table", {}, known.map(([name, value]) => element("tr", {}, element("th", {}, name), element("td", {}, value)))),
    one.text && element("pre", {}, one.text), one.operator && one.operator !== one.text && element("pre", {}, one.operator),
    ...source, ...arrayRows("reads", one.reads ?? []), ...arrayRows("writes", one.writes ?? []), ...code);
};

const reportPanel = (desk) => {
  const { notes } = desk.state, { partial } = desk;
  const soFar = (kind) => (partial[kind] && desk.under ? partial[kind] : "");
  const part = (label, text) => (text ? [element("h4", {}, label), element("pre", { class: `report ${label.replaceAll(" ", "-")}`, tabindex: "0" }, text)] : []);
  const file = element("input", { class: "path", value: desk.path, spellcheck: "false", "aria-label": "file",
    oninput: (event) => { desk.path = event.target.value; } });
  const ask = (type) => desk.channel.ask({ type, path: desk.path, version: desk.state.version }).then(desk.done, () => {});
  const nothing = !notes.verified && !notes.measured && !partial.verify && !partial.measure;
  return element("div", {},
    nothing ? element("p", { class: "soft" }, "Verify compares with PyTorch; Measure times the programs. First results come within seconds.") : null,
    ...part("verified so far", soFar("verify")), ...part("measured so far", soFar("measure")),
    ...part("verified", notes.verified), ...part("measured", notes.measured),
    element("h4", {}, "File"), file,
    element("div", { class: "buttons" },
      element("button", { class: "save", title: "the steps, as .json or .py", onclick: () => ask("save") }, "Save steps"),
      element("button", { class: "replay", title: "apply the steps of a file", onclick: () => ask("replay") }, "Replay"),
      element("button", { class: "export", title: "a page that needs no kernel", onclick: () => ask("export") }, "Write HTML")),
    ...part("replayed", desk.report));
};
