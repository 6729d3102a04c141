// The live page: one stream of events, and what of the page each changes.
"use strict";

const ROWS = 50;
const RECENT_MAX = 3000;
const TILES = [
  ["Loss", (v) => digits(v.run.loss, 4)],
  ["Validation", (v) => (v.run.validation ? digits(v.run.validation.loss, 4) : "–")],
  ["Tokens/s", (v) => short(v.run.tokens_per_s)],
  ["Time left", (v) => (v.run.state === "finished" ? "done" : v.run.tokens_per_s ? time(v.run.left_s) : "–")],
  ["Steps", (v) => count(v.run.step + 1) + " / " + short(v.run.target_steps)],
  ["Goodput", (v) => share(v.run.goodput)],
  ["Idle", (v) => share(v.run.idle)],
  ["Tokens", (v) => short(v.run.tokens)],
  ["Members", (v) => count(v.counts.servers + v.counts.volunteers)],
];
let pieces = [];
let recent = new Map();
let validations = new Map();
let rollbacks = null;
let members = [];
let first = 0;
let heardAt = 0;
let curveAt = 0;

const loss = new Chart($("loss"), [["loss", "--accent", 4, 2], ["lowest", "--soft", 4, 0.5], ["highest", "--soft", 4, 0.5],
  ["validation", "--bad", 4, 2, true]],
  (plot, low, high) => (low == null ? [0, 1] : [low - 0.05 * (high - low || 1), high + 0.05 * (high - low || 1)]));
const speed = new Chart($("speed"), [["tokens/s", "--accent", 0]], (plot, low, high) => [0, high ? 1.1 * high : 1]);

function curves() {
  const end = pieces.length ? pieces[pieces.length - 1][0] : -1;
  const rows = pieces.slice();
  for (const [step, row] of [...recent].sort((a, b) => a[0] - b[0])) {
    if (step > end) rows.push(row);
  }
  const column = (index) => rows.map((row) => row[index]);
  loss.show([column(0), column(1), column(2), column(3), validated(rows)]);
  speed.show([column(0), calm(column(4))]);
  const known = rows.filter((row) => row[1] != null);
  if (known.length) {
    const least = known.reduce((a, b) => (b[1] < a[1] ? b : a));
    const last = known[known.length - 1];
    say($("loss-words"), `${digits(known[0][1], 3)} at the beginning, ${digits(last[1], 3)} now; the lowest was `
      + `${digits(least[1], 3)} at step ${count(least[0])}. In nats per token.`
      + (validations.size ? ` Red: on text that is not trained on, ${digits([...validations.values()].pop(), 3)} now.` : ""));
  }
}

// A version's loss stands at the last row before its number of steps.
function validated(rows) {
  const values = rows.map(() => null);
  let at = 0;
  for (const [version, value] of [...validations].sort((a, b) => a[0] - b[0])) {
    while (at + 1 < rows.length && rows[at + 1][0] <= version) at += 1;
    if (rows.length) values[at] = value;
  }
  return values;
}

// The median of nine neighbours: two steps that close together would otherwise be a spike as high as the chart.
function calm(values) {
  return values.map((_, index) => {
    const near = values.slice(Math.max(0, index - 4), index + 5).filter((v) => v != null).sort((a, b) => a - b);
    return near.length ? near[near.length >> 1] : null;
  });
}

async function readCurve() {
  curveAt = Date.now();
  try {
    const answer = await fetch("page/curve", { cache: "no-store" });
    const found = await answer.json();
    pieces = found.pieces;
    validations = new Map(found.validations);
    const end = pieces.length ? pieces[pieces.length - 1][0] : -1;
    for (const step of [...recent.keys()]) if (step <= end) recent.delete(step);
    curves();
  } catch (error) {
    curveAt = Date.now() - 50_000;
  }
}

function takeSteps(view) {
  if (rollbacks !== null && rollbacks !== view.run.rollbacks) {
    recent = new Map();
    readCurve();
  }
  rollbacks = view.run.rollbacks;
  let news = false;
  let before = null;
  const newest = view.run.validation;
  if (newest && !validations.has(newest.version)) {
    validations.set(newest.version, newest.loss);
    news = true;
  }
  for (const [step, value, tokens, duration, wall] of view.steps) {
    const took = before !== null && wall > before ? wall - before : duration;
    before = wall;
    if (recent.has(step)) continue;
    recent.set(step, [step, value, value, value, took > 0 ? tokens / took : null]);
    news = true;
  }
  if (recent.size > RECENT_MAX || Date.now() - curveAt > 60_000) readCurve();
  else if (news) curves();
}

function showRun(view) {
  const run = view.run;
  document.title = `${run.name}: ${run.step + 1} of ${run.target_steps}`;
  say($("name"), run.name);
  say($("state"), run.state);
  $("state").className = "state " + run.state;
  say($("about"), `${run.model}, on ${run.data}; ${many(view.counts.servers, "server")}, ${many(view.counts.volunteers, "volunteer")}`
    + (run.lost_steps ? `; went back ${many(run.rollbacks, "time")}, ${many(run.lost_steps, "step")} done again` : ""));
  say($("waiting"), run.waiting_for ? capital(run.waiting_for) + ` (for ${time(run.waiting_s)})` : "");
  const done = run.target_steps ? (run.step + 1) / run.target_steps : 0;
  $("done").style.width = 100 * done + "%";
  $("bar").setAttribute("aria-valuemax", run.target_steps);
  $("bar").setAttribute("aria-valuenow", run.step + 1);
  keep($("tiles"), TILES, () => make("div", {}, make("dt"), make("dd")), (node, [label, value]) => {
    say(node.children[0], label);
    say(node.children[1], value(view));
  });
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function showStages(view) {
  const blocks = Math.max(1, ...view.stages.map((stage) => stage.end));
  keep($("stages"), view.stages, () => make("li", {}, make("h3"), make("p", { class: "quiet" }), make("ul"), make("p", { class: "crew" }), make("p", { class: "quiet" })), (node, stage) => {
    const [title, what, servers, crew, words] = node.children;
    node.style.flexGrow = (stage.end - stage.first) / blocks * 10;
    say(title, `Stage ${stage.stage}`);
    say(what, stage.blocks);
    keep(servers, stage.servers, () => make("li", {}, make("span", { class: "mark", "aria-hidden": "true" }), make("span")), (row, server) => {
      row.children[0].className = "mark" + (server.linked ? "" : " away");
      say(row.children[1], `${server.role} ${server.id}` + (server.linked ? "" : " is away") + (server.waits ? `, waiting at ${server.waits}` : ""));
    });
    const shown = Math.min(stage.volunteers, 60);
    say(crew, "●".repeat(shown) + (stage.volunteers > shown ? ` +${stage.volunteers - shown}` : ""));
    crew.setAttribute("aria-hidden", "true");
    say(words, `${many(stage.volunteers, "volunteer")}, ${stage.queue === 1 ? "1 task waits" : count(stage.queue) + " tasks wait"}`);
  });
  $("no-plan").hidden = view.stages.length > 0;
  say($("no-plan"), "No plan yet: " + (view.run.waiting_for || "no server has joined"));
}

function showSteps(view) {
  const rows = view.steps.slice(-12);
  if (!rows.length) return;
  const start = Math.min(...rows.map((row) => row[4] - row[3]));
  const end = Math.max(...rows.map((row) => row[4]));
  const scale = 1000 / (end - start || 1);
  const svg = "http://www.w3.org/2000/svg";
  keep($("steps"), rows, () => {
    const picture = document.createElementNS(svg, "svg");
    picture.setAttribute("viewBox", "0 0 1000 10");
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("aria-hidden", "true");
    const bar = document.createElementNS(svg, "rect");
    bar.setAttribute("y", "0");
    bar.setAttribute("height", "10");
    picture.append(bar);
    return make("div", {}, make("span"), picture, make("span"));
  }, (node, [step, , , duration, wall, skipped]) => {
    node.className = skipped ? "skipped" : "";
    say(node.children[0], "step " + count(step + 1));
    const bar = node.children[1].firstElementChild;
    bar.setAttribute("x", (scale * (wall - duration - start)).toFixed(1));
    bar.setAttribute("width", Math.max(2, scale * duration).toFixed(1));
    say(node.children[2], time(duration) + (skipped ? " skipped" : ""));
  });
}

function showPlan(view) {
  const plan = view.plan;
  say($("plan"), plan.generation ? `Plan ${plan.generation}: ${plan.sentence}` : "No plan is in force yet.");
  const kept = view.checkpoints;
  const lines = kept.named.map(([step, holders]) => `Step ${count(step)}: named by ${holders} of ${kept.servers} servers`);
  lines.unshift(kept.every_steps ? `A checkpoint every ${count(kept.every_steps)} steps` : "No checkpoints but the last");
  keep($("checkpoints"), lines, () => make("li"), (node, text) => say(node, text));
}

let pictured = null;

function showTimeline(view) {
  if (view.timeline_wall_s == null || view.timeline_wall_s === pictured) return;
  pictured = view.timeline_wall_s;
  $("timeline").src = `page/timeline.svg?${pictured}`;
  $("timeline").hidden = false;
  say($("timeline-words"), `Devices by stage, predicted above and measured below, as of ${clock(pictured)}.`);
}

function showEvents(view) {
  keep($("events"), view.events.slice().reverse(), () => make("li", {}, make("time"), make("span")), (node, event) => {
    say(node.children[0], clock(event.wall_s));
    node.children[1].className = event.level;
    say(node.children[1], [event.event, event.who, ...event.words].filter(Boolean).join(" · "));
  });
}

const COLUMNS = [{}, {}, {}, { class: "number", "data-label": "work" }, { "data-label": "by" }, { class: "number", "data-label": "round trip" }, { class: "number", "data-label": "here for" }];

function showMembers() {
  const wanted = $("find").value.trim().toLowerCase();
  const found = wanted
    ? members.filter((m) => [m.name, m.id, m.role, m.state, m.waits, m.paths].some((text) => text.toLowerCase().includes(wanted)))
    : members;
  first = Math.max(0, Math.min(first, ROWS * Math.floor((found.length - 1) / ROWS)));
  const shown = found.slice(first, first + ROWS);
  say($("page"), found.length ? `${first + 1}–${first + shown.length} of ${found.length}` : wanted ? "nobody" : "nobody yet");
  $("before").disabled = first === 0;
  $("after").disabled = first + ROWS >= found.length;
  keep($("rows"), shown, () => cells("tr", COLUMNS, "td"), (row, m) => {
    row.className = m.state === "away" ? "away" : "";
    row.lastElementChild.dataset.label = m.state === "away" ? "gone for" : "here for";
    const where = m.stage >= 0 && m.role === "volunteer" ? `, stage ${m.stage}` : "";
    const id = m.name.includes(m.id.slice(0, 8)) ? "" : " " + m.id.slice(0, 8);
    const texts = [m.name + where + id, m.state, m.waits, m.work ? count(m.work) : "", m.paths, m.trip_s == null ? "" : time(m.trip_s), time(m.since_s)];
    texts.forEach((text, index) => say(row.own[index], text));
  });
}

function listen() {
  const stream = new EventSource("page/events");
  stream.addEventListener("overview", (event) => {
    heardAt = Date.now();
    const view = JSON.parse(event.data);
    showRun(view);
    takeSteps(view);
    showStages(view);
    showSteps(view);
    showPlan(view);
    showEvents(view);
    showTimeline(view);
    $("operator").hidden = !view.operator;
  });
  stream.addEventListener("members", (event) => {
    members = JSON.parse(event.data);
    showMembers();
  });
  // A browser asks again by itself when a stream ends, but gives it up for good at an answer that is none: from a
  // coordinator with too many viewers, or from what stands before it while it starts again.
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) setTimeout(comeAgain, 3000 + 7000 * Math.random());
  });
  return stream;
}

function comeAgain() {
  if (!document.hidden && stream.readyState === EventSource.CLOSED) stream = listen();
}

function order(event) {
  event.preventDefault();
  const who = $("who").value.trim();
  const found = members.filter((m) => m.id === who || m.id.startsWith(who));
  if (found.length !== 1) {
    say($("said"), found.length ? "several members begin so" : "no member begins so");
    return;
  }
  say($("said"), "…");
  fetch("api/ban", {
    method: "POST",
    headers: { Authorization: "Bearer " + $("token").value, "Content-Type": "application/json" },
    body: JSON.stringify({ node: found[0].id, reason: $("why").value }),
  })
    .then(async (answer) => say($("said"), answer.ok ? `banned: ${found[0].name}` : (await answer.json()).error))
    .catch(() => say($("said"), "the coordinator does not answer"));
}

let stream = listen();
readCurve();
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream.close();
  else comeAgain();
});
$("find").addEventListener("input", () => { first = 0; showMembers(); });
$("before").addEventListener("click", () => { first -= ROWS; showMembers(); });
$("after").addEventListener("click", () => { first += ROWS; showMembers(); });
$("order").addEventListener("submit", order);
setInterval(() => {
  const silent = (Date.now() - heardAt) / 1000;
  say($("fresh"), !heardAt ? "Connecting…" : silent < 5 ? "Live." : `No word from the coordinator for ${time(silent)}; training goes on without it.`);
}, 1000);
