// Sorts a table by the column whose heading is clicked, and shows the rows with a text. The first rows are shown at first.
(() => {
const units = { "": 1, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, kFLOP: 1e3, MFLOP: 1e6, GFLOP: 1e9, TFLOP: 1e12,
  "\u00b5s": 1e-6, ms: 1e-3, s: 1, "%": 1, "\u00d7": 1 };
const numberOf = (text) => {
  const found = /^([+\u2212-]?[\d.,]+(?:e[+-]?\d+)?)\s*([^\s\d]*)$/.exec(text.trim());
  if (!found || !(found[2] in units)) return null;
  return Number(found[1].replaceAll(",", "").replace("\u2212", "-")) * units[found[2]];
};
const enhance = (table) => {
  const head = table.tHead.rows[0], body = table.tBodies[0], rows = [...body.rows];
  let order = rows, text = "", all = false;
  const extra = document.createElement("p"), many = rows.some((row) => row.hidden);
  const show = () => {
    const wanted = text.toLowerCase();
    body.replaceChildren(...order);
    let shown = 0;
    for (const row of order) {
      const fits = row.textContent.toLowerCase().includes(wanted);
      row.hidden = !fits || (!all && !wanted && shown >= ROWS);
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} rows`;
    more.hidden = all || shown === rows.length || Boolean(wanted);
  };
  const count = document.createElement("span"), more = document.createElement("button");
  const filter = document.createElement("input");
  count.setAttribute("role", "status");
  more.type = "button";
  more.textContent = "show all";
  more.onclick = () => { all = true; show(); };
  filter.type = "search";
  filter.placeholder = "filter";
  filter.setAttribute("aria-label", `filter rows by ${head.cells[0].textContent}`);
  filter.oninput = () => { text = filter.value; show(); };
  [...head.cells].forEach((cell, place) => {
    if (!cell.textContent) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = cell.textContent;
    button.onclick = () => {
      const sign = cell.getAttribute("aria-sort") === "descending" ? 1 : -1;
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      const key = (text) => [numberOf(text), text];
      const keys = new Map(rows.map((row) => [row, key(row.cells[place].textContent)]));
      order = [...rows].sort((a, b) => {
        const [[x, s], [y, t]] = [keys.get(a), keys.get(b)];
        if ((x === null) !== (y === null)) return x === null ? 1 : -1;
        return sign * (x === null ? s.localeCompare(t) : x - y);
      });
      show();
    };
    cell.replaceChildren(button);
  });
  if (rows.length > 8) { extra.append(filter, " ", count, " ", more); table.before(extra); }
  if (many || rows.length > 8) show();
};
for (const table of document.querySelectorAll("table.sortable")) enhance(table);
for (const note of document.querySelectorAll(".more-rows")) note.remove();
})();
