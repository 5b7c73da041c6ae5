// The page: what arrives on the stream becomes text, bars and charts. Nothing from the server is ever taken for markup.

import { Chart, Store, drawAll } from "./charts.js";
import { NONE, ahead, bytes, clock, element, percent, rate, seconds, setData, setFacts, setText, when } from "./format.js";
import { Stream } from "./stream.js";

const COLOURS = 10; // in page.css
const HEALTH = {
  good: ["✓", "SLO met"],
  warn: ["!", "below its SLO"],
  bad: ["✕", "SLO violated"],
  idle: ["○", "no requests"],
  off: ["–", "not served"],
};
const at = (id) => document.getElementById(id);
const store = new Store();
const colours = new Map(); // by model, in the order in which they came
const models = new Map(); // rows by name
const partitions = new Map(); // rows by device and number
const devices = new Map(); // cards by name
const jobs = new Map(); // rows by id
let plan = null;
let alarming = new Set();

function colourOf(model) {
  if (!colours.has(model)) colours.set(model, String(colours.size % COLOURS));
  return colours.get(model);
}

function dot(model) {
  const made = element("i", "dot");
  made.dataset.model = colourOf(model);
  return made;
}

function figure(term) {
  const value = element("span");
  const note = element("small");
  return { value, note, item: element("div", "", element("dt", "", term), element("dd", "", value, note)) };
}

// Keep rows by key in their order; make those that are new, drop those that are gone.
function keyed(parent, rows, keys, make) {
  for (const [key, row] of rows) {
    if (!keys.includes(key)) {
      row.charts.forEach((chart) => chart.close());
      row.element.remove();
      rows.delete(key);
    }
  }
  keys.forEach((key, index) => {
    if (!rows.has(key)) rows.set(key, make(key));
    const row = rows.get(key).element;
    if (parent(key).children[index] !== row && parent(key).contains(row) === false) parent(key).append(row);
  });
}

// Models

function modelRow(name) {
  const chip = element("p", "chip");
  const state = element("p", "why");
  const names = ["SLO attainment", "Latency p50", "p99", "Target", "Requests/s", "Rejected/s", "Queue"].map(figure);
  const [attainment, p50, p99, slo, requests, refused, queue] = names;
  const gauge = element("div", "gauge", element("i", "p99"), element("i", "p50"), element("i", "mark"));
  gauge.setAttribute("aria-hidden", "true");
  const row = { chip, state, attainment, p50, p99, slo, requests, refused, queue, gauge, limit: null };
  row.charts = [
    new Chart(
      store,
      "Requests/s",
      [
        { key: `${name} rate`, label: "all", colour: "--line-soft", fill: "--fill-soft" },
        { key: `${name} goodput`, label: "in time", colour: "--good" },
      ],
      rate,
    ),
    new Chart(
      store,
      "Latency",
      [
        { key: `${name} p99`, label: "p99", colour: "--line" },
        { key: `${name} p50`, label: "p50", colour: "--line-soft" },
      ],
      seconds,
      { limit: () => row.limit, least: 0.001 },
    ),
  ];
  const title = element("h3", "", dot(name), element("span", "name", name));
  const head = element("div", "head", title, chip, state);
  const figures = element("dl", "numbers", ...names.map((each) => each.item));
  const article = element("article", "", head, element("div", "middle", figures, gauge), ...row.charts.map((c) => c.element));
  article.setAttribute("aria-label", name);
  row.element = element("li", "model card", article);
  row.element.id = `model-${name}`;
  row.element.tabIndex = -1;
  return row;
}

function showModel(view) {
  const row = models.get(view.name);
  const [sign, word] = HEALTH[view.health];
  setData(row.element, "health", view.health);
  setText(row.chip, `${sign} ${word}`);
  const told = [view.state === "READY" ? "" : view.state.toLowerCase(), view.reason, view.why && view.health !== "good" && `rejected: ${view.why}`];
  setText(row.state, told.filter(Boolean).join(" · "));
  setText(row.attainment.value, percent(view.attainment));
  setText(row.attainment.note, view.objective === null ? "" : ` SLO ${percent(view.objective, 3)}`);
  setText(row.p50.value, seconds(view.p50));
  setText(row.p99.value, seconds(view.p99));
  setText(row.slo.value, seconds(view.slo));
  setText(row.requests.value, rate(view.rate));
  setText(row.requests.note, view.planned ? ` planned ${rate(view.planned)}` : "");
  setText(row.refused.value, rate(view.refused + view.failed));
  setText(row.queue.value, String(view.queue));
  setData(row.p99.item, "level", view.p99 !== null && view.slo !== null && view.p99 > view.slo ? "bad" : "");
  setData(row.refused.item, "level", view.refused + view.failed >= 0.05 ? "warn" : "");
  row.limit = view.slo;
  const whole = view.slo ? Math.max(view.slo * 1.25, (view.p99 ?? 0) * 1.05) : 0;
  const part = (value) => `${whole && value ? Math.min((value / whole) * 100, 100) : 0}%`;
  row.gauge.children[0].style.width = part(view.p99);
  row.gauge.children[1].style.width = part(view.p50);
  row.gauge.children[2].style.left = part(view.slo);
  setData(row.gauge, "over", view.p99 !== null && view.slo !== null && view.p99 > view.slo ? "yes" : "");
}

// Partitions

const keyOf = (view) => JSON.stringify([view.device, view.partition]);

function deviceCard(name) {
  const note = element("p", "hint");
  const cuts = element("div", "cuts");
  cuts.setAttribute("role", "img");
  const rows = element("ul", "rows");
  const card = element("div", "card device", element("div", "heading", element("h3", "", name), note), cuts, rows);
  return { element: card, note, cuts, rows, charts: [] };
}

function partitionRow(key) {
  const [device, number] = JSON.parse(key);
  const chip = element("p", "chip");
  const held = element("p", "why");
  const bar = element("div", "time");
  bar.setAttribute("role", "img");
  const shares = element("ul", "shares");
  const names = ["Busy", "Share used", "Slowdown", "Queue", "Restarts", "Standby", "Memory"].map(figure);
  const [busy, used, slowdown, queue, restarts, standby, memory] = names;
  const chart = new Chart(
    store,
    "Busy",
    [{ key: `busy ${key}`, label: "part of the time", colour: "--line", fill: "--fill" }],
    (value) => percent(value, 0),
    { top: 1 },
  );
  const title = element("h4", "", `Partition ${number}`);
  const head = element("div", "head", title, chip, held);
  const middle = element("div", "middle", element("dl", "numbers", ...names.map((each) => each.item)), bar, shares);
  const article = element("article", "", head, middle, chart.element);
  article.setAttribute("aria-label", `${device} partition ${number}`);
  const row = { chip, held, bar, shares, title, busy, used, slowdown, queue, restarts, standby, memory, charts: [chart] };
  row.element = element("li", "partition", article);
  row.element.id = `partition-${device}-${number}`;
  row.element.tabIndex = -1;
  return row;
}

function showPartition(view) {
  const row = partitions.get(keyOf(view));
  const total = Object.values(view.busy).reduce((sum, part) => sum + part, 0);
  setText(row.title, `Partition ${view.partition} · ${percent(view.share)}`);
  setText(row.chip, view.state === "ready" ? "✓ ready" : `✕ ${view.state}`);
  setData(row.element, "health", view.state === "ready" ? "good" : view.state === "starting" ? "warn" : "bad");
  setText(row.held, view.reason ? `${view.lane}: ${view.reason}` : view.lane);
  setText(row.busy.value, percent(Math.min(total, 1)));
  setText(row.used.value, view.used === null ? NONE : percent(view.used));
  setData(row.used.item, "level", view.over_share ? "bad" : "");
  setText(row.slowdown.value, view.slowdown === null ? NONE : `${view.slowdown.toFixed(2)} ×`);
  setText(row.slowdown.note, view.predicted_slowdown === null ? "" : ` predicted ${view.predicted_slowdown.toFixed(2)} ×`);
  setText(row.queue.value, String(view.queue));
  setText(row.restarts.value, String(view.restarts));
  setText(row.standby.value, view.standby || NONE);
  setText(row.memory.value, bytes(view.memory));
  const parts = view.models.map((model) => [model, view.busy[model] ?? 0]);
  while (row.bar.children.length > parts.length) row.bar.lastChild.remove();
  while (row.bar.children.length < parts.length) row.bar.append(element("i"));
  while (row.shares.children.length > parts.length) row.shares.lastChild.remove();
  while (row.shares.children.length < parts.length) row.shares.append(element("li", "", element("i", "dot"), element("span")));
  parts.forEach(([model, part], index) => {
    setData(row.bar.children[index], "model", colourOf(model));
    row.bar.children[index].style.width = `${(part / Math.max(total, 1)) * 100}%`;
    setData(row.shares.children[index].children[0], "model", colourOf(model));
    setText(row.shares.children[index].children[1], `${model} ${percent(part)}`);
  });
  const words = parts.map(([model, part]) => `${model} ${percent(part)}`);
  row.bar.setAttribute("aria-label", `Last minute: ${words.join(", ")}, idle ${percent(Math.max(0, 1 - total))}`);
}

function showDevices(views) {
  const names = [...new Set(views.map((view) => view.device))];
  keyed(() => at("devices"), devices, names, deviceCard);
  const card = (key) => devices.get(JSON.parse(key)[0]).rows;
  for (const name of names) {
    const own = views.filter((view) => view.device === name);
    own.sort((a, b) => parseFloat(a.partition) - parseFloat(b.partition));
    const device = devices.get(name);
    const share = own.filter((view) => !view.partition.includes(".")).reduce((sum, view) => sum + view.share, 0);
    setText(device.note, `${own.length} ${own.length === 1 ? "partition" : "partitions"}, ${percent(share)} of the device`);
    showCuts(device.cuts, own);
  }
  keyed(card, partitions, views.map(keyOf), partitionRow);
  views.forEach(showPartition);
}

function showCuts(box, views) {
  while (box.children.length > views.length) box.lastChild.remove();
  while (box.children.length < views.length) box.append(element("span", "cut"));
  views.forEach((view, index) => {
    const cut = box.children[index];
    const wanted = `${view.partition} ${percent(view.share)} ${view.models.join("\n")}`;
    cut.style.flexGrow = String(Math.max(view.share, 0.02));
    if (cut.dataset.shown === wanted) return;
    cut.dataset.shown = wanted;
    cut.title = `Partition ${view.partition}, ${percent(view.share)}: ${view.models.join(", ")}`;
    const held = view.models.map((model) => element("span", "held", dot(model), element("span", "", model)));
    cut.replaceChildren(element("b", "", `${view.partition} · ${percent(view.share)}`), ...held);
  });
  setData(box, "many", views.length > 8 ? "yes" : "");
  box.setAttribute("aria-label", views.map((view) => `Partition ${view.partition}, ${percent(view.share)}: ${view.models.join(", ")}`).join("; "));
}

// Best-effort jobs

const JOB = {
  queued: "○ waits",
  running: "✓ runs",
  paused: "○ paused",
  succeeded: "✓ done",
  failed: "✕ failed",
  cancelled: "– cancelled",
};

function jobRow(id) {
  const chip = element("p", "chip");
  const state = element("p", "why");
  const names = ["Steps", "Steps/s", "Granted now", "Share-seconds", "Ends", "Slowdown"].map(figure);
  const [steps, speed, granted, spent, ends, slowdown] = names;
  const bar = element("div", "time", element("i"));
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-label", `${id}: steps done`);
  const results = element("ul", "shares");
  const head = element("div", "head", element("h3", "", element("span", "name", id)), chip, state);
  const figures = element("dl", "numbers", ...names.map((each) => each.item));
  const article = element("article", "", head, element("div", "middle", figures, bar), results);
  article.setAttribute("aria-label", `Job ${id}`);
  const row = { chip, state, steps, speed, granted, spent, ends, slowdown, bar, results, charts: [] };
  row.element = element("li", "job card", article);
  row.element.id = `job-${id}`;
  row.element.tabIndex = -1;
  return row;
}

function showJob(view, now) {
  const row = jobs.get(view.job);
  const waits = view.state === "running" && !view.granted;
  setData(row.element, "health", view.health);
  setText(row.chip, waits ? "○ yields" : JOB[view.state]);
  const told = [view.work, view.device, view.attempt > 1 && `attempt ${view.attempt}`, view.reason];
  setText(row.state, told.filter(Boolean).join(" · "));
  setText(row.steps.value, view.steps.toLocaleString("en"));
  setText(row.steps.note, view.total === null ? "" : ` of ${view.total.toLocaleString("en")}`);
  setText(row.speed.value, rate(view.throughput));
  setText(row.granted.value, view.state === "running" ? percent(view.granted, 0) : NONE);
  setText(row.spent.value, rate(view.share_seconds));
  setText(row.ends.value, view.predicted_end === null ? NONE : ahead(view.predicted_end - now));
  setText(row.ends.note, view.deadline === null ? "" : ` due ${ahead(view.deadline - now)}`);
  setData(row.ends.item, "level", view.late ? "warn" : "");
  setText(row.slowdown.value, view.slowed === null ? NONE : `${view.slowed.toFixed(2)} ×`);
  setText(row.slowdown.note, view.slows === null ? "" : ` serving ${view.slows.toFixed(2)} ×`);
  const done = view.total ? Math.min(view.steps / view.total, 1) : 0;
  row.bar.hidden = view.total === null;
  row.bar.setAttribute("aria-valuenow", String(Math.floor(done * 100)));
  row.bar.children[0].style.width = `${done * 100}%`;
  const results = Object.entries(view.metrics);
  while (row.results.children.length > results.length) row.results.lastChild.remove();
  while (row.results.children.length < results.length) row.results.append(element("li"));
  results.forEach(([name, value], index) => setText(row.results.children[index], `${name} ${Number(value.toPrecision(4))}`));
}

function showJobs(views, now) {
  at("jobs").hidden = at("jobs-link").hidden = !views.length;
  keyed(() => at("job-rows"), jobs, views.map((view) => view.job), jobRow);
  views.forEach((view) => showJob(view, now));
}

// All the rest

function showFigures(tick) {
  const sum = (name) => tick.models.reduce((total, model) => total + model[name], 0);
  const asked = tick.models.filter((model) => model.attainment !== null);
  const met = asked.filter((model) => model.health === "good").length;
  const busy = tick.partitions.map((view) => Object.values(view.busy).reduce((total, part) => total + part, 0));
  const mean = busy.length ? busy.reduce((total, part) => total + Math.min(part, 1), 0) / busy.length : null;
  const worst = asked.some((model) => model.health === "bad") ? "bad" : met < asked.length ? "warn" : "good";
  setFacts(at("figures"), [
    ["SLOs met", asked.length ? `${met} of ${asked.length}` : NONE, asked.length ? worst : ""],
    ["Requests/s", rate(sum("rate"))],
    ["In time/s", rate(sum("goodput"))],
    ["Rejected/s", rate(sum("refused") + sum("failed")), sum("refused") + sum("failed") >= 0.05 ? "warn" : ""],
    ["Queued", String(sum("queue"))],
    ["Partitions busy", mean === null ? NONE : percent(mean)],
  ]);
}

function anchorOf(about) {
  const target = about && at(about);
  return target ? `#${encodeURIComponent(about)}` : "";
}

function showAlarms(list) {
  const box = at("alarms");
  while (box.children.length > list.length) box.lastChild.remove();
  while (box.children.length < list.length) box.append(element("li", "alarm", element("b"), element("a")));
  list.forEach((alarm, index) => {
    const item = box.children[index];
    setData(item, "level", alarm.level);
    setText(item.children[0], alarm.level === "bad" ? "✕" : "!");
    const anchor = anchorOf(alarm.about);
    if (anchor) item.children[1].setAttribute("href", anchor);
    else item.children[1].removeAttribute("href");
    setText(item.children[1], alarm.text);
  });
  const known = new Set(list.map((alarm) => `${alarm.level} ${alarm.about}`));
  const fresh = list.filter((alarm) => !alarming.has(`${alarm.level} ${alarm.about}`));
  if (fresh.length) setText(at("announcer"), fresh.map((alarm) => alarm.text).join(" "));
  alarming = known;
  const worst = list.filter((alarm) => alarm.level === "bad").length;
  document.title = worst ? `(${worst}) Cotenant` : "Cotenant";
}

function showMachine(machine) {
  const foreign = machine.foreign;
  setFacts(at("machine-facts"), [
    ["Other programs", foreign === null ? "not known" : `${foreign.toFixed(1)} of ${machine.processors} processors`, foreign !== null && foreign >= machine.processors / 4 ? "warn" : ""],
    ["Batches take", machine.slowdown === null ? "not known" : `${machine.slowdown.toFixed(2)} × as long as predicted`, machine.slowdown >= 1.2 ? "warn" : ""],
    ["The server itself", machine.server === null ? "not known" : `${machine.server.toFixed(2)} processors`],
  ]);
}

function table(id, rows) {
  const body = at(id).tBodies[0];
  if (!rows.length) rows = [[["None yet."]]];
  body.replaceChildren(
    ...rows.map(([cells, level]) => {
      const row = element("tr", "", ...cells.map((cell) => element("td", "", cell)));
      if (cells.length === 1) row.children[0].colSpan = 9;
      if (level) row.dataset.level = level;
      return row;
    }),
  );
}

function showPlan(view) {
  plan = view;
  setText(at("revision"), view.revision ? `Plan ${view.revision}: ${view.reason}` : "No plan yet");
  setText(at("isolation"), view.isolation);
  setText(at("version"), `Cotenant ${view.version}`);
  const unserved = Object.entries(view.unserved).map(([name, missing]) => `${name} ${rate(missing)}/s`);
  setFacts(at("plan-facts"), [
    ["Revision", view.revision ? String(view.revision) : NONE],
    ["Why", view.reason],
    ["Rollout", view.rollout],
    ["Planner", view.planner],
    ["Validation", view.validation],
    ["Controller", view.activity],
    ["Profiles", view.refinement],
    ["Not served", unserved.join(", "), "warn"],
  ]);
  table("decisions", view.decisions.slice(0, 30).map((each) => [[when(each.time), each.action, each.reason]]));
  table(
    "rollouts",
    view.rollouts.map((each) => [
      [when(each.time), String(each.revision), each.reason, each.failure ? `${each.outcome}: ${each.failure}` : each.outcome, seconds(each.seconds), each.phases, String(each.late)],
      each.failed ? "bad" : "",
    ]),
  );
  table(
    "durations",
    view.durations.map((each) => [[each.step, String(each.count), seconds(each.p50), seconds(each.p99), seconds(each.max)]]),
  );
  setText(at("late"), `since the start · ${view.late} late ${view.late === 1 ? "request" : "requests"} while a rollout was under way`);
}

function showTick(tick) {
  at("content").hidden = false;
  tick.models.forEach((model) => colourOf(model.name));
  keyed(() => at("model-rows"), models, tick.models.map((model) => model.name), modelRow);
  tick.models.forEach(showModel);
  showDevices(tick.partitions);
  showJobs(tick.jobs, tick.time);
  showFigures(tick);
  showAlarms(tick.alarms);
  showMachine(tick.machine);
  setText(at("updated"), `Updated ${clock(tick.time)}`);
  const words = { starting: "Starting", serving: "Serving", stopping: "Stopping" };
  setText(at("connection"), words[tick.state]);
  setData(at("connection"), "state", tick.state);
}

function addPoints(event) {
  const rows = [];
  for (const [name, series] of Object.entries(event.models)) {
    for (const kind of ["rate", "goodput", "p50", "p99"]) rows.push([`${name} ${kind}`, series[kind]]);
  }
  for (const view of event.partitions) rows.push([`busy ${keyOf(view)}`, view.busy]);
  store.add(event, rows);
  drawAll();
}

function showConnection(state, status, why) {
  at("login").hidden = state !== "refused";
  document.body.classList.toggle("stale", state !== "live");
  if (state === "live") return;
  setData(at("connection"), "state", "waiting");
  setText(at("connection"), state === "refused" ? "Not allowed" : "Reconnecting");
  if (state === "refused") {
    setText(at("login-why"), why);
    at("content").hidden = true;
    at("token").focus();
  }
}

const stream = new Stream("cotenant/events", { charts: addPoints, plan: showPlan, tick: showTick }, showConnection);
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  stream.useToken(at("token").value);
  at("token").value = "";
});
stream.connect();
