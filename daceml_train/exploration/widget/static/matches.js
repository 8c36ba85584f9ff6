// Places where passes apply: bytes promised, reasons for refusals, preview, options, apply.
const optionFields = (about, edited) =>
  about.options.length
    ? element(
        "div", { class: "options" },
        about.options.map((option) =>
          element("label", { title: option.type }, `${option.name} `,
            element("input", {
              value: edited[option.name] ?? option.default, "data-option": option.name, spellcheck: "false",
              oninput: (event) => {
                const { value } = event.target;
                if (value.trim() === option.default) delete edited[option.name];
                else edited[option.name] = value;
              },
            }))))
    : element("p", { class: "soft" }, "no options");

const previewTable = (preview) => {
  if (preview.reason) return element("p", { class: "refusal" }, preview.reason);
  const shown = { bytes: bytesText, peak: bytesText, flops: flopsText, operators: String };
  const names = { bytes: "bytes moved", peak: "peak memory", flops: "arithmetic", operators: "operators" };
  const rows = preview.rows.map(([name, before, after]) =>
    element("tr", {}, element("th", {}, names[name]), element("td", {}, shown[name](before)),
      element("td", {}, "→"), element("td", { class: after < before ? "gain" : after > before ? "loss" : "" }, shown[name](after)),
      element("td", { class: "soft" }, after === before ? "" : (after > before ? "+" : "−") + shown[name](Math.abs(after - before)))));
  const lines = (label, list, count) => count
    ? element("div", { class: "nodes" }, `${label} (${count})`, element("pre", {}, list.join("\n") + (count > list.length ? "\n…" : "")))
    : null;
  return element("div", { class: "preview" }, element("table", {}, rows),
    lines("gone or changed", preview.removed, preview.gone), lines("new or changed", preview.added, preview.new));
};

const matchCard = (match, desk) => {
  const about = desk.state.passes.find((one) => one.name === match.name) ?? { options: [], picture: "", summary: "" };
  const id = `${desk.state.version}:${match.number}`;
  const open = desk.unfolded === id;
  const request = (type) => ({
    type, number: match.number, version: desk.state.version,
    options: desk.edited.id === id ? desk.edited.options : {},
  });
  const body = open
    ? element("div", { class: "more" },
        about.summary && element("p", {}, about.summary),
        about.picture && element("pre", { class: "drawn" }, about.picture),
        match.source && element("p", { class: "soft" }, `${match.module} ${match.source}`),
        optionFields(about, desk.editing(id)),
        desk.preview?.id === id ? previewTable(desk.preview.made) : null)
    : null;
  const run = (type) => desk.channel.ask(request(type));
  return element(
    "div",
    {
      class: `card${match.refusal ? " refused" : ""}`, tabindex: "0", role: "group", "data-name": match.name, "data-number": match.number,
      "aria-label": `${match.name} at ${match.where}`,
      onmouseenter: () => desk.light(match.keys), onmouseleave: () => desk.light([]),
      onfocus: () => desk.light(match.keys), onblur: () => desk.light([]),
      onclick: (event) => { if (!event.target.closest("button,input,pre")) desk.unfold(open ? null : id); },
      onkeydown: (event) => {
        if (event.target !== event.currentTarget) return;
        if (event.key === "Enter") { desk.unfold(open ? null : id); event.preventDefault(); }
        if (event.key === "a" && !match.refusal) run("apply").then(desk.done, () => {});
        if (event.key === "p") run("preview").then((answer) => desk.previewed(id, answer.preview), () => {});
      },
    },
    element("div", { class: "head" },
      element("span", { class: "title" }, match.name),
      element("span", { class: match.bytes < 0 ? "gain" : match.bytes > 0 ? "loss" : "soft" },
        match.bytes == null ? "see preview" : match.bytes === 0 ? "±0 B" : changeText(match.bytes))),
    element("div", { class: "where", title: match.where }, match.where),
    match.refusal ? element("div", { class: "refusal" }, match.refusal) : null,
    body,
    element("div", { class: "buttons" },
      element("button", { class: "show", title: "zoom to it", onclick: () => desk.reveal(match) }, "Show"),
      element("button", { class: "preview", onclick: () =>
        run("preview").then((answer) => desk.previewed(id, answer.preview), () => {}) }, "Preview"),
      element("button", { class: "apply", disabled: Boolean(match.refusal), onclick: () =>
        run("apply").then(desk.done, () => {}) }, "Apply")),
  );
};

const passForm = (desk) => {
  const about = desk.state.passes.find((one) => one.name === desk.filter.pass);
  if (!about) return null;
  const id = `${desk.state.version}:${about.name}`;
  const run = (type) => desk.channel.ask({
    type, pass: about.name, version: desk.state.version,
    options: desk.edited.id === id ? desk.edited.options : {},
  });
  return element("div", { class: "card pass" },
    element("p", {}, about.summary), about.picture && element("pre", { class: "drawn" }, about.picture),
    optionFields(about, desk.editing(id)),
    desk.preview?.id === id ? previewTable(desk.preview.made) : null,
    element("div", { class: "buttons" },
      element("button", { class: "preview-pass", onclick: () =>
        run("preview").then((answer) => desk.previewed(id, answer.preview), () => {}) }, "Preview"),
      element("button", { class: "apply-pass", onclick: () => run("apply").then(desk.done, () => {}) }, "Apply everywhere")));
};

const gainText = (total) => total.bytes ? changeText(total.bytes) : total.unknown ? "see preview" : "±0 B";
const countText = (total) => [total.count ? `${total.count} ${total.count === 1 ? "match" : "matches"}` : "",
  total.refused ? `${total.refused} refused` : ""].filter(Boolean).join(", ");

// A pass: its totals, "apply everywhere", and its matches module by module. The first pass is open.
const passGroup = (group, place, cards, desk) => {
  const { version, filter } = desk.state;
  const open = desk.grouped.get(group.name) ?? (place === 0 || Boolean(filter.pass) || cards.some((card) => card.open));
  const everywhere = !filter.keys?.length && !filter.text && group.count > 1
    ? element("button", { class: "everywhere", title: `apply ${group.name} at all ${group.count} matches`, onclick: () =>
        desk.channel.ask({ type: "apply", pass: group.name, version, options: {} }).then(desk.done, () => {}) }, "Apply everywhere")
    : null;
  const modules = group.modules.map((module) => {
    const own = cards.filter((card) => card.module === module.name);
    const more = module.count + module.refused - own.length;
    return element("div", { class: "module" },
      element("div", { class: "head" }, element("span", { class: "path" }, module.name || "the step"),
        element("span", { class: "soft" }, `${countText(module)}, ${gainText(module)}`)),
      own.map((card) => card.card),
      more > 0 ? element("button", { class: "more-of", onclick: () => desk.narrow({ pass: group.name, text: module.name }) }, `${more} more`) : null);
  });
  return element("section", { class: "group", "data-pass": group.name, "aria-label": group.name },
    element("div", { class: "head" },
      element("button", { class: "fold-group", "aria-expanded": String(open), onclick: () => { desk.grouped.set(group.name, !open); desk.side(); } },
        `${open ? "▾" : "▸"} ${group.name}`),
      element("span", { class: group.bytes < 0 ? "gain" : group.bytes > 0 ? "loss" : "soft" }, gainText(group))),
    element("div", { class: "buttons" }, element("span", { class: "soft" }, `${countText(group)} · ${group.level}`), everywhere),
    open ? modules : null);
};

const matchesPanel = (desk) => {
  const { matches, found, listing, passes, groups } = desk.state;
  const levels = [...new Set(passes.map((one) => one.level))];
  const choice = element("select", { class: "pass", title: "which pass", "aria-label": "which pass", onchange: (event) => desk.narrow({ pass: event.target.value }) },
    element("option", { value: "" }, "all passes"),
    levels.map((level) => element("optgroup", { label: level }, passes.filter((one) => one.level === level)
      .map((one) => element("option", { value: one.name, selected: one.name === desk.filter.pass }, one.name)))));
  const text = element("input", { type: "search", placeholder: "module, array", "aria-label": "module, array, or operator", class: "narrow",
    value: desk.filter.text ?? "", onchange: (event) => desk.narrow({ text: event.target.value }) });
  const refused = element("label", {}, element("input", { type: "checkbox", class: "refused", checked: Boolean(desk.filter.refused),
    onchange: (event) => desk.narrow({ refused: event.target.checked }) }), " refused matches, with reasons");
  const count = listing ? (found ? `${found} matches so far…` : "listing matches…") : `${found} ${found === 1 ? "match" : "matches"}` +
    (found > matches.length ? `, ${matches.length} of them listed` : "");
  const cards = matches.map((match) => ({ name: match.name, module: match.module, open: desk.unfolded === `${desk.state.version}:${match.number}`,
    card: matchCard(match, desk) }));
  const selected = desk.filter.keys?.length
    ? element("button", { class: "clear", onclick: () => desk.clearSelection() }, "in the selection ×") : null;
  const rest = element("button", { class: "default-pipeline", title: "every pass that training runs by default, a step each", onclick: () =>
    desk.channel.ask({ type: "default", version: desk.state.version }).then(desk.done, () => {}) }, "Apply the default pipeline");
  return element("div", {}, element("div", { class: "filters" }, choice, text, refused),
    element("div", { class: "buttons" }, element("span", { class: "soft count" }, count, " ", selected), rest), passForm(desk),
    (groups ?? []).map((group, place) => passGroup(group, place, cards.filter((card) => card.name === group.name), desk)));
};
