// Shows what the daemon says, as text only: names come from the run's operator and must never become markup.
"use strict";

const at = (id) => document.getElementById(id);
const show = (id, text) => { if (at(id).textContent !== text) at(id).textContent = text; };
const gigabytes = (bytes) => `${(bytes / 1e9).toFixed(2)} GB`;
const mbit = (rate) => rate === null ? "no limit" : `${(rate * 8e-6).toFixed(1)} Mbit/s`;
const WORDS = { working: "Working", waiting: "Waiting", paused: "Paused", finishing: "Finishing", leaving: "Ending" };

function given(amount) {
  const hours = amount.working_s / 3600;
  const time = hours >= 1 ? `${hours.toFixed(1)} hours` : `${Math.round(amount.working_s / 60)} minutes`;
  const tokens = Math.round(amount.tokens).toLocaleString("en");
  return `${Math.round(amount.tasks).toLocaleString("en")} tasks accepted, ${tokens} tokens, ${time} of work`;
}

// The loss so far, as a line. Every number is one; nothing of it becomes markup.
function renderCurve(points) {
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
  show("loss", `from ${from} to ${to}`);
}

function renderNews(status) {
  const news = status.news, signed = status.signed.ever;
  at("news").hidden = news === null;
  at("signed-title").hidden = at("signed").hidden = signed === null;
  if (signed !== null) show("signed", given(signed));
  if (news === null) return;
  show("step", news.step < 0 ? "none is finished yet" : news.step.toLocaleString("en"));
  renderCurve(news.curve);
  const part = news.hour_ratio > 0 ? `${(100 * news.hour_ratio).toFixed(1)} % of the last hour's work; step `
    + `${news.step.toLocaleString("en")} holds ${news.step_tasks.toLocaleString("en")} of your tasks` : "nothing yet";
  show("part", part);
  at("sample").hidden = at("sample-title").hidden = !news.sample;
  show("sample", news.sample);
  show("sample-step", news.sample ? `after step ${news.sample_step.toLocaleString("en")}` : "");
}

function render(status) {
  show("run", status.run || "a run that has not answered yet");
  const held = status.state !== "working";
  at("state").classList.toggle("held", held);
  const stage = status.stage >= 0 ? `, stage ${status.stage + 1} of ${status.stages}` : "";
  const free = status.state === "paused" && status.device.free ? " Nothing runs; the device's memory is free." : "";
  show("state", held ? `${WORDS[status.state]}: ${status.sentence}.${free}` : `Working${stage}`);
  const others = status.holds.filter(([reason]) => reason !== status.reason).map(([, sentence]) => sentence);
  at("also").hidden = others.length === 0;
  show("also", `Also: ${others.join("; ")}`);
  at("complaint").hidden = !status.complaint;
  show("complaint", status.complaint);
  const device = status.device;
  const share = device.share < 1 ? `, ${Math.round(100 * device.share)} % of the time` : "";
  show("device", device.name + share);
  const limit = device.temperature_limit_c === null ? "" : ` of ${device.temperature_limit_c} °C`;
  const power = device.power_w === null ? "" : `, ${Math.round(device.power_w)} W`;
  show("temperature", (device.temperature_c === null ? "no sensor" : `${Math.round(device.temperature_c)} °C${limit}`) + power);
  const line = status.line;
  show("line", `${mbit(line.bytes_per_s)} now; limits: ${mbit(line.up_limit_bytes_per_s)} up, `
    + `${mbit(line.down_limit_bytes_per_s)} down; ${gigabytes(line.moved_bytes)} this visit`);
  show("quota", line.quota_left_bytes === null ? "no quota" : `${gigabytes(line.quota_left_bytes)} left`);
  show("today", given(status.today));
  show("visit", given(status.visit));
  show("ever", given(status.ever));
  renderNews(status);
  renderLimits(status.limits, status.meanings, order);
}

async function order(body, done) {
  const reply = await fetch("/api/order", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const answer = await reply.json();
  at("answer").classList.toggle("wrong", Boolean(answer.error));
  show("answer", answer.error || done);
  if (!answer.error) render(answer);
}

at("pause").addEventListener("click", () => order({ verb: "pause" }, "paused"));
at("snooze").addEventListener("click", () => order({ verb: "pause", for_s: 3600 }, "paused for an hour"));
at("resume").addEventListener("click", () => order({ verb: "resume" }, "resumed"));
at("finish").addEventListener("click", () => order({ verb: "finish" }, "finishing"));
at("leave").addEventListener("click", () => order({ verb: "leave" }, "it ends"));
at("withdraw").addEventListener("click", () => order({ verb: "leave", for_good: true }, "your yes is taken back; it ends"));

const events = new EventSource("/api/events");
events.addEventListener("message", (event) => render(JSON.parse(event.data)));
events.addEventListener("error", () => {
  at("state").classList.add("held");
  show("state", "The program on this computer does not answer; trying again …");
});
