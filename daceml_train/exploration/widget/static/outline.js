// The tree at the left: phases, modules, operators, bodies of kernels, each with its bytes. Arrow keys walk it.
const outlineRow = (row, desk) => {
  const share = desk.state.view.bytes ? row.bytes / desk.state.view.bytes : 0;
  const time = row.seconds == null ? "" : ` · ${secondsText(row.seconds)}`;
  return element(
    "div",
    {
      class: "row", role: "treeitem", tabindex: "-1", "aria-level": String(row.depth + 1), "data-key": row.key, style: `padding-left:${4 + 12 * row.depth}px`,
      title: `${row.module || row.label}\n` +
        (row.operators ? `${row.operators} operators, ${bytesText(row.bytes)}${time}` : `${bytesText(row.bytes)} of parameters`),
      "aria-expanded": row.opens ? String(row.open) : null,
      onclick: () => desk.pick(row.key), ondblclick: () => desk.toggle(row),
      onmouseenter: () => desk.light([row.key]), onmouseleave: () => desk.light([]),
    },
    element(
      "span",
      { class: "fold", onclick: (event) => { event.stopPropagation(); if (row.opens) desk.toggle(row); } },
      row.opens ? (row.open ? "▾" : "▸") : "",
    ),
    element("span", { class: `dot ${row.phase}` }),
    element("span", { class: "name" }, row.label),
    element("span", { class: "bar", style: `--share:${Math.round(100 * share)}%` }, bytesText(row.bytes)),
  );
};

const outlineKeys = (desk) => (event) => {
  const rows = [...event.currentTarget.querySelectorAll(".row")];
  const at = rows.indexOf(event.target.closest(".row"));
  const row = desk.state.view.outline[at];
  const go = (place) => rows[Math.max(0, Math.min(rows.length - 1, place))]?.focus();
  if (event.key === "ArrowDown") go(at + 1);
  else if (event.key === "ArrowUp") go(at - 1);
  else if (event.key === "Enter" && row) desk.pick(row.key);
  else if (event.key === "ArrowRight" && row?.opens && !row.open) desk.toggle(row);
  else if (event.key === "ArrowLeft" && row?.open) desk.toggle(row);
  else return;
  event.preventDefault();
  event.stopPropagation();
};

// The rows around an item, outermost first, and the item itself; empty where the tree does not show it.
const pathTo = (key, rows) => {
  const path = [];
  let at = rows.findIndex((row) => row.key === key);
  for (; at >= 0 && (!path.length || path[0].depth > 0); at--)
    if (!path.length || rows[at].depth < path[0].depth) path.unshift(rows[at]);
  return path;
};

// Where the chosen box is: each group around it, to choose and zoom to.
const breadcrumb = (desk) => {
  const [key, more] = desk.chosen;
  const path = key === undefined || more !== undefined ? [] : pathTo(key, desk.state.view.outline);
  const steps = path.map((row, place) => element("button", { "data-key": row.key, "aria-current": place === path.length - 1 ? "location" : null,
    title: row.module || row.label, onclick: () => { desk.pick(row.key); desk.jump([row.key]); } }, row.label));
  return steps.flatMap((step, place) => (place ? [element("span", { class: "soft", "aria-hidden": "true" }, "›"), step] : [step]));
};

const outline = (desk) => {
  const rows = desk.state.view.outline.map((row) => outlineRow(row, desk));
  for (const row of rows) if (desk.chosen.has(row.dataset.key)) row.classList.add("chosen");
  (rows.find((row) => row.dataset.key === desk.focused) ?? rows[0])?.setAttribute("tabindex", "0");
  return element(
    "div",
    { class: "tree", role: "tree", "aria-label": "modules", onkeydown: outlineKeys(desk),
      onfocusin: (event) => { desk.focused = event.target.closest(".row")?.dataset.key; } },
    rows,
  );
};
