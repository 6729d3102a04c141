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
  renderLimits(status.limits, status.meanings);
}

function renderLimits(limits, meanings) {
  const form = at("limits");
  for (const [name, value] of Object.entries(limits)) {
    let input = at(`limit-${name}`);
    if (input === null) {
      const row = document.createElement("div");
      row.className = "limit";
      const label = document.createElement("label");
      label.htmlFor = `limit-${name}`;
      label.textContent = name;
      const meaning = document.createElement("small");
      meaning.id = `meaning-${name}`;
      meaning.textContent = meanings[name];
      const both = document.createElement("span");
      input = document.createElement("input");
      input.id = `limit-${name}`;
      input.setAttribute("aria-describedby", meaning.id);
      const set = document.createElement("button");
      set.type = "button";
      set.textContent = "Set";
      set.setAttribute("aria-label", `Set ${name}`);
      const send = () => order({ verb: "limits", values: { [name]: input.value } }, `${name} is set`);
      set.addEventListener("click", send);
      input.addEventListener("keydown", (event) => {
        if (event.key === "Enter") { event.preventDefault(); send(); }
      });
      both.append(input, set);
      row.append(label, meaning, both);
      form.append(row);
      input.value = value;
    }
    if (input.dataset.shown !== value && document.activeElement !== input) input.value = value;
    input.dataset.shown = value;
  }
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
