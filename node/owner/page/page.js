// Shows what the daemon says, as text only: names come from the run's operator and must never become markup.
"use strict";

const at = (id) => document.getElementById(id);
const show = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(2)} GB`;
const mbit = (rate) => `${(rate * 8e-6).toFixed(1)} Mbit/s`;
const most = (rate) => rate === null ? "no limit" : `at most ${mbit(rate)}`;
const WORDS = { working: "Working", waiting: "Waiting", paused: "Paused", finishing: "Finishing", leaving: "Ending" };

const WAYS = { tcp: "by TCP", quic: "by UDP", channel: "by a data channel", relay: "through a relay" };

let last = null;

function plural(count, word) {
  const whole = Math.round(count);
  return `${whole.toLocaleString("en")} ${word}${whole === 1 ? "" : "s"}`;
}

function timeOf(amount) {
  const hours = amount.working_s / 3600;
  if (amount.working_s > 0 && amount.working_s < 60) return "less than a minute";
  return hours >= 1 ? `${hours.toFixed(1)} hours` : plural(amount.working_s / 60, "minute");
}

function amountOf(amount) { return `${plural(amount.tasks, "task")} accepted, ${plural(amount.tokens, "token")}`; }

function given(amount) { return `${amountOf(amount)}, ${timeOf(amount)} of work`; }

// The run knows nothing of the time in which this computer had work, only how long its own steps took.
function signedGift(amount, atLeast) {
  return `${amountOf(amount)}, in steps of the run that took ${atLeast ? "at least " : ""}${timeOf(amount)}`;
}

// The loss so far, as a line. Every number is one; nothing of it becomes markup.
function renderCurve(points, asOf) {
  const svg = at("curve");
  svg.setAttribute("visibility", points.length > 1 ? "visible" : "hidden");
  if (points.length < 2) return;
  const losses = points.map(([, loss]) => loss);
  const least = Math.min(...losses), span = (Math.max(...losses) - least) || 1;
  const first = points[0][0], steps = (points[points.length - 1][0] - first) || 1;
  const spot = ([step, loss]) => `${(300 * (step - first) / steps).toFixed(1)},${(56 - 52 * (loss - least) / span).toFixed(1)}`;
  at("line-of-loss").setAttribute("points", points.map(spot).join(" "));
  const from = losses[0].toFixed(2), to = losses[losses.length - 1].toFixed(2);
  svg.setAttribute("aria-label", `Loss from ${from} to ${to}`);
  show("loss", `from ${from} to ${to}${asOf}`);
}

function renderNews(status) {
  const news = status.news, signed = status.signed.ever;
  at("news").hidden = news === null;
  at("signed-title").hidden = at("signed").hidden = signed === null;
  if (signed !== null) show("signed", signedGift(signed, status.cards.length > 0));
  if (news === null) return;
  const asOf = news.as_of ? `, as of ${news.as_of}` : "";
  show("step", news.step < 0 ? "none known yet" : (news.step + 1).toLocaleString("en") + asOf);
  renderCurve(news.curve, asOf);
  at("tested").hidden = at("tested-title").hidden = news.validated_step < 0;
  show("tested", `${news.validation_loss.toFixed(2)} after ${plural(news.validated_step, "step")}`);
  const held = news.step_tasks
    ? `; step ${(news.step + 1).toLocaleString("en")} holds ${news.step_tasks.toLocaleString("en")} of your tasks` : "";
  const hour = news.as_of ? `the work of the hour before ${news.as_of}` : "the last hour's work";
  show("part", news.hour_ratio > 0 ? `${(100 * news.hour_ratio).toFixed(1)} % of ${hour}${held}` : "none known yet");
  at("sample").hidden = !news.sample;
  show("sample", news.sample);
  show("sample-step", news.sample ? `after step ${news.sample_step.toLocaleString("en")}`
    : "nothing yet: that comes with the first checkpoint of a trained model, where servers share them");
}

// What one of several devices does, as `barnraise status` says it.
function cardOf(card, stages) {
  if (card.ended) return `${card.device}: takes no part: ${card.ended}`;
  if (card.stage < 0) return `${card.device}: waiting for ${card.waiting_for || "a place in the run"}`;
  const waits = card.waiting_for && !card.busy ? `, waiting for ${card.waiting_for}` : "";
  return `${card.device}: part ${card.stage + 1} of ${stages}${waits}`;
}

function renderCards(cards, stages) {
  at("cards").hidden = at("cards-title").hidden = cards.length === 0;
  const lines = cards.map((card) => cardOf(card, stages));
  const shown = [...at("cards").children].map((line) => line.textContent);
  if (shown.join("\n") === lines.join("\n")) return;
  at("cards").replaceChildren(...lines.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
}

function partsOf(status) {
  const held = status.cards.filter((card) => !card.ended && card.stage >= 0).map((card) => card.stage);
  const parts = [...new Set([status.stage, ...held])].sort((one, other) => one - other).map((stage) => stage + 1);
  const last = parts.pop();
  return `${parts.length ? `parts ${parts.join(", ")} and` : "part"} ${last} of ${status.stages}`;
}

function render(status) {
  show("run", status.run || "Barnraise");
  const held = status.state !== "working";
  at("state").classList.toggle("held", held);
  const stage = status.stage >= 0 ? ` on ${partsOf(status)} of the model` : "";
  const free = status.state === "paused" && status.device.free ? " Nothing runs; the device's memory is free." : "";
  last = status;
  at("present").hidden = false;
  answersOrders(status.state !== "leaving");
  offerResume(status.state !== "leaving" && status.holds.some(([reason]) => reason === "user"));
  document.title = `${WORDS[status.state]} – Barnraise`;
  const then = status.state === "finishing" ? " what was begun, then it pauses" : "";
  const why = `${WORDS[status.state]}${then}: ${status.sentence.replace(/^waiting /, "")}.${free}`;
  show("state", held ? why : `Working${stage}`);
  const others = status.holds.filter(([reason]) => reason !== status.reason).map(([, sentence]) => sentence);
  at("also").hidden = others.length === 0;
  show("also", `Also: ${others.join("; ")}`);
  at("update").hidden = !status.update;
  show("update", `Update: ${status.update}.`);
  at("complaint").hidden = !status.complaint;
  show("complaint", status.complaint);
  const device = status.device;
  const share = device.share < 1 ? `, ${Math.round(100 * device.share)} % of the time` : "";
  const whose = device.free ? "for this program itself" : "in use for it";
  const memory = device.memory_bytes ? `, ${(device.memory_bytes / 1e9).toFixed(1)} GB of memory ${whose}` : "";
  show("device", device.name + memory + share);
  renderCards(status.cards, status.stages);
  const limit = device.temperature_limit_c === null ? "" : ` of ${device.temperature_limit_c} °C`;
  const power = device.power_w === null ? "" : `, ${Math.round(device.power_w)} W`;
  show("temperature", (device.temperature_c === null ? "no sensor" : `${Math.round(device.temperature_c)} °C${limit}`) + power);
  const line = status.line;
  const up = line.up_limit_bytes_per_s, down = line.down_limit_bytes_per_s;
  const rates = up === null && down === null ? "no limits" : `${most(up)} up, ${most(down)} down`;
  const links = Object.entries(line.paths).map(([path, count]) => `${count} ${WAYS[path] || path}`).join(", ");
  const now = links ? `${mbit(line.bytes_per_s)} now, ` : "";
  show("line", `${now}${gigabytes(line.moved_bytes)} this visit, both ways together; ${rates}; links: ${links || "none"}`);
  show("quota", line.quota_left_bytes === null ? "no quota" : `${(line.quota_left_bytes / 1e9).toFixed(1)} GB left`);
  show("today", given(status.today));
  show("visit", given(status.visit));
  show("ever", given(status.ever));
  renderNews(status);
  renderLimits(status.limits, status.meanings, order);
}

// What nobody would hear cannot be clicked, and an answer of before says nothing about now.
function answersOrders(does) {
  for (const control of document.querySelectorAll("button, select, input")) {
    if (control.disabled === does) control.disabled = !does;
  }
  if (!does) show("answer", "");
}

// Only the owner's own pause can be ended by a click. Whoever ended it with the keyboard goes on at the button before.
function offerResume(does) {
  const resume = at("resume");
  const focused = document.activeElement === resume;
  resume.disabled = !does;
  if (!does && focused) at("pause").focus();
}

async function order(body, done, place = "answer") {
  const answer = await send(body, done, place);
  if (!answer.error) render(answer);
}

at("pause").addEventListener("click", () => order({ verb: "pause" }, "Paused, until you resume."));
at("snooze").addEventListener("click", () => order(
  { verb: "pause", for_s: Number(at("snooze-for").value) }, `Paused for ${at("snooze-for").selectedOptions[0].text}.`));
at("resume").addEventListener("click", () => order({ verb: "resume" }, "Your pause is over."));
at("finish").addEventListener("click", () => order({ verb: "finish" }, "It finishes what it has begun, then it pauses."));
at("leave").addEventListener("click", () => order({ verb: "leave" }, "It ends.", "answer-yes"));
at("withdraw").addEventListener("click", () => order(
  { verb: "leave", for_good: true }, "Your yes is taken back; it ends.", "answer-yes"));

const events = new EventSource("/api/events");
events.addEventListener("message", (event) => render(JSON.parse(event.data)));
events.addEventListener("error", () => {
  at("state").classList.add("held");
  answersOrders(false);
  const ended = last !== null && last.state === "leaving";
  document.title = `${ended ? "Ended" : "No answer"} – Barnraise`;
  at("present").hidden = ended;
  at("why-it-works").hidden = ended;
  show("state", ended ? `${last.ending === "finished" ? "The run is finished, so it" : "It"} has ended. ${last.thanks}` : "The program on this computer does not answer; trying again …");
});
