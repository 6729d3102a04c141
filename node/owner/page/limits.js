// The form of all limits, for both pages. `order(body, done)` sends one to the daemon.
"use strict";

function renderLimits(limits, meanings, order) {
  const form = document.getElementById("limits");
  for (const [name, value] of Object.entries(limits)) {
    let input = document.getElementById(`limit-${name}`);
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
