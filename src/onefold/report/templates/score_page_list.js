// Script of the score page, part 2 of 2: gallery or table, details of an input, and controls.

/* Gallery, or table where there are no pictures */
const GAP = 20, TILE = 132, ROW = 40;
const buildTile = (item) => {
  const entry = make("div");
  entry.setAttribute("role", "listitem");
  const tile = make("button", "tile", "", entry);
  tile.type = "button";
  tile.tabIndex = -1;
  tile.dataset.item = item;
  picture(data.pictures, item, make("span", "picture", "", tile)).setAttribute("aria-hidden", "true");
  make("span", "pill", "flagged", tile);
  make("b", "", brief(data.names[item]), tile).title = data.names[item];
  make("small", "", [short(scores[item]), chance(item)].filter(Boolean).join("  ·  "), tile);
  return entry;
};
const refreshTile = (entry, item, position) => {
  entry.setAttribute("aria-posinset", position + 1);
  entry.setAttribute("aria-setsize", roll.list.length);
  const parts = [data.names[item], short(scores[item]), chance(item), flagged(item) && "flagged"];
  entry.firstChild.setAttribute("aria-label", parts.filter(Boolean).join(", "));
  entry.firstChild.classList.toggle("is-flagged", flagged(item));
  entry.querySelector(".pill").hidden = !flagged(item);
};
const tileLayout = () => {
  const wide = $("gallery").clientWidth + GAP, columns = Math.max(2, Math.floor(wide / (TILE + GAP)));
  const width = wide / columns - GAP;
  return { columns, width, across: width + GAP, stride: Math.ceil(width) + 60 + GAP };
};

const standing = (item) => { // the columns that stand out most in this row, the first one most
  const row = data.standout ? numbers(data.standout[item]) : [];
  return [...row.keys()].filter((c) => row[c] > 0).sort((a, b) => row[b] - row[a]);
};
const numeric = (c) => data.values.every((row) => row[c].trim() === "" || !Number.isNaN(Number(row[c])));
const heads = [
  { name: "Rank", width: "5em", number: true, text: (i) => whole(ranks[i]) },
  { name: "Flag", width: "6.5em", pill: true, text: () => "" },
  { name: "Name", width: "minmax(9em, 1fr)", title: true, text: (i) => data.names[i] },
  { name: "Score", width: "7em", number: true, text: (i) => short(scores[i]) },
  ...(pvalues ? [{ name: "p-value", width: "6.5em", number: true, text: (i) => chance(i).replace(/^p /, "") }] : []),
  ...(data.standout ? [{ name: "Stands out", width: "15em", names: true, text: () => "" }] : []),
  ...data.shown.map((column) => {
    const size = Math.max(data.columns[column].length, ...data.values.slice(0, 200).map((row) => row[column].length));
    const width = clamp(size * 0.62 + 2.2, 5, 16) + "em";
    return { name: data.columns[column], width, column, number: numeric(column), text: (i) => data.values[i][column] };
  }),
];
const buildRow = (item) => {
  const row = make("div", "row");
  row.setAttribute("role", "row");
  row.tabIndex = -1;
  row.dataset.item = item;
  row.style.gridTemplateColumns = heads.map((head) => head.width).join(" ");
  for (const head of heads) {
    const cell = make("span", head.number ? "number" : head.title ? "title" : "", head.text(item), row);
    cell.setAttribute("role", "gridcell");
    if (head.pill) make("span", "pill", "flagged", cell);
    if (head.title || head.column !== undefined) cell.title = cell.textContent;
  }
  return row;
};
const refreshRow = (row, item, position) => {
  row.setAttribute("aria-rowindex", position + 2);
  row.querySelector(".pill").hidden = !flagged(item);
  const most = flagged(item) ? standing(item).slice(0, STANDING_OUT) : [];
  heads.forEach((head, i) => {
    row.children[i].classList.toggle("stands-out", most.includes(head.column));
    if (head.names) row.children[i].title = row.children[i].textContent = most.map((c) => data.columns[c]).join(", ");
  });
};
const buildTable = () => {
  const head = make("div", "row head", "", $("table")), rows = make("div", "rows", "", $("table"));
  head.setAttribute("role", "row");
  rows.setAttribute("role", "rowgroup");
  head.style.gridTemplateColumns = heads.map((h) => h.width).join(" ");
  for (const { name, number } of heads) {
    make("span", number ? "number" : "", name, head).setAttribute("role", "columnheader");
  }
  head.style.width = rows.style.width = "max-content";
  rows.style.minWidth = head.style.minWidth = "100%";
  return new Roll(rows, $("table"), () => {
    rows.style.width = head.offsetWidth + "px"; // entries are outside the flow; they take the width of the head
    return { columns: 1, width: 0, across: 0, stride: ROW };
  }, buildRow, refreshRow);
};

/* One input in detail */
const fact = (list, name, text) => { make("dt", "", name, list); make("dd", "", text, list); };
const facts = (item, parent) => {
  const list = make("dl", "facts", "", parent), below = familiar.length - above(familiar, scores[item]);
  fact(list, "Flagged", flagged(item) ? "yes, above the threshold" : "no");
  fact(list, "Rank", `${whole(ranks[item])} of ${whole(count)}, least familiar first`);
  fact(list, "Score", short(scores[item]));
  if (chance(item)) fact(list, "p-value", chance(item).replace(/^p /, ""));
  if (familiar.length && !Number.isNaN(scores[item])) {
    fact(list, "Compared", `at or above ${percent(below, familiar.length)} of familiar data`);
  }
};
const neighbours = (item, parent) => {
  make("h3", "", "Nearest familiar images", parent);
  const list = make("ol", "neighbours", "", parent);
  data.nearest[item].forEach((index, i) => {
    const canvas = picture(data.familiarPictures, index, make("li", "", "", list));
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Familiar image, number ${i + 1} in closeness`);
  });
};
const fields = (item, parent) => {
  const order = standing(item), most = flagged(item) ? order.slice(0, STANDING_OUT) : [];
  const rest = data.columns.map((_, c) => c).filter((c) => !order.includes(c));
  const weights = data.standout && numbers(data.standout[item]), peak = weights && weights[order[0]];
  make("h3", "", data.standout ? "Columns, those that stand out most first" : "Columns", parent);
  const table = make("table", "fields", "", parent);
  for (const column of order.concat(rest)) {
    const row = make("tr", most.includes(column) ? "most" : "", "", table);
    make("th", "", data.columns[column], row).scope = "row";
    make("td", "", data.values[item][column], row);
    if (!weights) continue;
    const bar = make("i", "", "", make("div", "bar", "", make("td", "", "", row)));
    const share = Number.isFinite(peak) ? weights[column] / peak : weights[column] === peak;
    bar.style.width = 100 * clamp(Number(share) || 0, 0, 1) + "%";
    make("td", "", Number.isNaN(weights[column]) ? "–" : short(weights[column]), row);
  }
};
const signed = (x) => (x > 0 ? "+" : "") + short(x);
const fall = (effect) => (effect >= 0 ? `falls by ${short(effect)}` : `rises by ${short(-effect)}`);
const heatMap = (why, frame, parent) => { // a layer over the picture: a patch is redder the more it raises the score
  const effects = numbers(why.effects), peak = Math.max(...effects), [rows, columns] = why.edges;
  const wide = columns.length - 1, layer = make("canvas", "heat", "", frame);
  layer.height = rows.at(-1);
  layer.width = columns.at(-1);
  const pen = layer.getContext("2d");
  pen.fillStyle = getComputedStyle(layer).color;
  effects.forEach((effect, i) => {
    const y = Math.floor(i / wide), x = i % wide;
    pen.globalAlpha = peak > 0 ? 0.75 * clamp(effect / peak, 0, 1) : 0;
    pen.fillRect(columns[x], rows[y], columns[x + 1] - columns[x], rows[y + 1] - rows[y]);
  });
  const tick = make("label", "tick", "", parent), box = make("input", "", "", tick);
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => { layer.hidden = !box.checked; });
  tick.append(" What raises the score");
  const most = why.parts[effects.indexOf(peak)];
  make("p", "hint", `With the training mean in the reddest patch (${most}), the score ${fall(peak)}.`, parent);
};
const reasons = (why, parent) => { // parts with the largest effects as a table
  const effects = numbers(why.effects), peak = Math.max(...effects);
  const texts = [["Value", why.values], ["Typical", why.typical], ["Nearest familiar", why.nearest]].filter((t) => t[1]);
  make("h3", "", "What raises the score: its fall with a typical value in this place", parent);
  const table = make("table", "fields reasons", "", make("div", "scroll", "", parent));
  const head = make("tr", "", "", table);
  for (const name of [why.kind === "columns" ? "Column" : "Entry", "Fall", "", ...texts.map((t) => t[0])]) {
    make("th", "", name, head).scope = "col";
  }
  effects.forEach((effect, i) => {
    const share = peak > 0 ? clamp(effect / peak, 0, 1) : 0;
    const row = make("tr", i < STANDING_OUT && share > 0.1 ? "most" : "", "", table);
    make("th", "", why.parts[i], row).scope = "row";
    make("td", "", signed(effect), row);
    make("i", "", "", make("div", "bar", "", make("td", "", "", row))).style.width = 100 * share + "%";
    for (const [, text] of texts) make("td", "", text[i], row);
  });
  if (why.count > effects.length) make("p", "hint", `and ${whole(why.count - effects.length)} more`, parent);
};
let opened = -1;
const openDetail = (item) => {
  if (item < 0) return;
  opened = item;
  const position = roll.where[item], body = $("detail-body");
  $("detail-name").textContent = data.names[item];
  $("detail-place").textContent = `${whole(position + 1)} of ${whole(roll.list.length)}`;
  const pressed = document.activeElement;
  $("previous").disabled = position === 0;
  $("next").disabled = position === roll.list.length - 1;
  if (pressed?.disabled) $("close").focus(); // a disabled button cannot keep the focus
  body.replaceChildren();
  const sides = make("div", data.pictures ? "sides" : "sides single", "", body), why = data.explanations[item];
  if (data.pictures) {
    const left = make("div", "", "", sides), frame = make("div", "large", "", left);
    const canvas = picture(data.pictures, item, frame);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", data.names[item]);
    if (why?.kind === "patches") heatMap(why, frame, left);
  }
  const side = make("div", "", "", sides);
  facts(item, side);
  if (data.nearest && data.familiarPictures && data.nearest[item].length) neighbours(item, side);
  if (why && why.kind !== "patches") reasons(why, body);
  if (data.columns && !(why && why.count === why.effects.length)) fields(item, body);
  if (!$("detail").open) $("detail").showModal();
  $("detail").scrollTop = 0;
};
const step = (by) => {
  const item = roll.list[roll.where[opened] + by];
  if (item !== undefined) openDetail(item);
};

/* Orders, filter, search */
const strangest = [...scores.keys()].sort((a, b) => {
  const missing = Number.isNaN(scores[a]) - Number.isNaN(scores[b]);
  return missing || (scores[a] === scores[b] ? a - b : scores[b] > scores[a] ? 1 : -1) || 0;
});
const ranks = new Int32Array(count);
strangest.forEach((item, position) => { ranks[item] = position + 1; });
const has = strangest.filter((i) => !Number.isNaN(scores[i])), missing = strangest.slice(has.length);
const orders = {
  strange: () => strangest,
  familiar: () => [...has].reverse().concat(missing),
  name: () => {
    const { compare } = new Intl.Collator("en", { numeric: true });
    return [...scores.keys()].sort((a, b) => compare(data.names[a], data.names[b]) || a - b);
  },
};
const ordered = {};
const lower = data.names.map((name) => name.toLowerCase());
const roll = data.pictures ? new Roll($("gallery"), null, tileLayout, buildTile, refreshTile) : buildTable();
const refill = () => {
  const kind = $("order").value, only = $("flagged-only").checked, query = $("search").value.trim().toLowerCase();
  ordered[kind] ??= orders[kind]();
  const list = ordered[kind].filter((i) => (!only || flagged(i)) && (!query || lower[i].includes(query)));
  $("shown-count").textContent = `${list.length === count ? "all" : `${whole(list.length)} of`} ${whole(count)}`;
  $("nothing").hidden = list.length > 0;
  $(data.pictures ? "gallery" : "table").hidden = list.length === 0;
  $("table").setAttribute("aria-rowcount", list.length + 1);
  roll.show(list);
};

/* What the threshold does */
const setThreshold = (value) => {
  threshold = value;
  const alarms = above(familiar, threshold), found = above(scored, threshold), at = threshold === calibrated;
  const rate = familiar.length ? percent(alarms, familiar.length) : "–";
  $("flagged-count").textContent = whole(found);
  $("flagged-share").textContent = `${percent(found, scored.length)} of ${whole(scored.length)} new inputs`
    + (scored.length < count ? `; ${whole(count - scored.length)} have no score` : "");
  $("false-rate").textContent = rate;
  $("false-count").textContent = familiar.length
    ? `${whole(alarms)} of ${whole(familiar.length)} held-out familiar inputs` : "no held-out familiar scores";
  $("threshold-value").textContent = short(threshold);
  const target = data.fpr === null ? "as calibrated" : `calibrated for ${percent(Number(data.fpr), 1)} false alarms`;
  const moved = calibrated === null ? "not calibrated" : `moved; calibrated ${short(calibrated)}`;
  $("threshold-note").textContent = at ? target : moved;
  $("now").replaceChildren(make("b", "", whole(found)), ` flagged above ${short(threshold)}`);
  const spoken = `${short(threshold)}: ${whole(found)} of ${whole(scored.length)} flagged`;
  $("threshold").setAttribute("aria-valuetext", familiar.length ? `${spoken}, ${rate} false alarms` : spoken);
  moveLine();
  if ($("flagged-only").checked) refill(); else roll.draw();
};
const slide = () => {
  const at = Number($("threshold").value); // at the calibrated step, use the exact calibrated threshold
  setThreshold(calibrated !== null && at === stepOf(calibrated) ? calibrated : scoreAt(at / STEPS));
};
const reset = () => {
  $("threshold").value = stepOf(start);
  setThreshold(start);
};
const save = () => {
  const quote = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" + text : text).replace(/"/g, '""')}"`; // no formulas
  const rows = strangest.filter(flagged).map((i) => {
    const p = pvalues && pvalues[i] >= 0 ? pvalues[i] : "";
    return [quote(data.originals[i] ?? data.names[i]), scores[i], p, ranks[i]].join(",");
  });
  const text = ["name,score,pvalue,rank", ...rows, ""].join("\r\n");
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const link = make("a");
  link.href = address;
  link.download = "flagged.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
};

/* Begin */
const keyEntry = (className, text) => make("li", "", "", $("key")).append(make("i", className), text);
if (familiar.length) keyEntry("familiar", `${whole(familiar.length)} familiar, held out (upper half)`);
keyEntry("plain", `${whole(scored.length)} new${familiar.length ? " (lower half)" : ""}`);
keyEntry("accent", "above the threshold");
make("li", "axis", `score${log ? ", logarithmic" : ""} →`, $("key"));
$("histogram-text").textContent = "Histogram of the scores" + (log ? ", on a logarithmic axis" : "")
  + (familiar.length ? ": familiar data above, new data below" : "");
$("threshold").addEventListener("input", slide);
$("reset").addEventListener("click", reset);
$("export").addEventListener("click", save);
for (const id of ["order", "flagged-only"]) $(id).addEventListener("change", refill);
$("search").addEventListener("input", refill);
$("close").addEventListener("click", () => $("detail").close());
$("previous").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("detail").addEventListener("click", (event) => { if (event.target === $("detail")) $("detail").close(); });
$("detail").addEventListener("close", () => roll.focus(opened));
$("detail").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) step(by);
});
const drag = (event) => {
  if (!event.buttons) return;
  const share = (event.clientX - svg.getBoundingClientRect().left - INSET) / (wide - 2 * INSET);
  $("threshold").value = Math.round(clamp(share, 0, 1) * STEPS);
  slide();
};
svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); drag(event); });
svg.addEventListener("pointermove", drag);
drawHistogram();
refill();
reset();
addEventListener("resize", () => roll.later());
new ResizeObserver(() => { if (svg.clientWidth !== wide) { drawHistogram(); roll.draw(); } }).observe(svg);
