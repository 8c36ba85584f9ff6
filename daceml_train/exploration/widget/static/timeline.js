// What was measured, in the order in which it runs: a lane per phase, and the operators that take longest.
const LONGEST = 40;

const timelinePanel = (desk) => {
  const { timeline } = desk.state;
  if (!timeline.length) return element("p", { class: "soft" }, "Not measured yet: press Measure.");
  const total = timeline.reduce((sum, one) => sum + one.seconds, 0);
  const go = (one) => desk.channel.ask({ type: "find", key: one.key }).then((found) => {
    desk.pick(one.key);
    setTimeout(() => desk.viewer?.fit(found.keys), 200);
  }, () => {});
  const named = (one) => (one.module && !one.label.startsWith(`${one.module.split(".").at(-1)}:`) ? `${one.module}: ${one.label}` : one.label);
  const told = (one) => `${named(one)}, ${secondsText(one.seconds)}, ${bytesText(one.bytes)}`;
  const lanes = ["forward", "backward", "update"].filter((phase) => timeline.some((one) => one.phase === phase)).map((phase) => {
    const own = timeline.filter((one) => one.phase === phase), sum = own.reduce((all, one) => all + one.seconds, 0);
    return element("div", { class: "lane" },
      element("div", { class: "head" }, element("span", {}, element("span", { class: `dot ${phase}` }), phase), element("span", {}, secondsText(sum))),
      element("div", { class: "launches", role: "img", "aria-label": `${phase}: ${own.length} operators, ${secondsText(sum)}` },
        own.map((one) => element("span", {
          class: `launch ${phase}`, title: told(one), style: `left:${(100 * one.begin) / total}%;width:${(100 * one.seconds) / total}%`,
          onclick: () => go(one), onmouseenter: () => desk.light([one.key]), onmouseleave: () => desk.light([]),
        }))));
  });
  const longest = [...timeline].sort((a, b) => b.seconds - a.seconds).slice(0, LONGEST);
  return element("div", {},
    element("p", { class: "soft" }, `${timeline.length} operators, ${secondsText(total)} in all, medians of measured launches.`),
    lanes, element("h4", {}, "longest"),
    element("ol", { class: "longest" }, longest.map((one) => element("li", {},
      element("button", { class: "launch-row", title: told(one), onclick: () => go(one),
        onmouseenter: () => desk.light([one.key]), onmouseleave: () => desk.light([]) },
        element("span", { class: `dot ${one.phase}` }), element("span", { class: "name" }, named(one)),
        element("span", {}, secondsText(one.seconds)))))));
};
