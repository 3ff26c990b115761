// The form of a new job: files that were uploaded, a plan that follows the fields, and refusals at the field that they name.
"use strict";
(() => {
  const { $, $$ } = window.page;
  const form = $("#new");

  let waiting;
  const planSoon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => htmx.trigger("#plan", "plan"), 350);
  };
  form.addEventListener("input", (event) => { event.target.removeAttribute("aria-invalid"); planSoon(); });
  form.addEventListener("change", planSoon); // a choice from a list that says nothing while it is made

  // A button applies a change that the plan suggests.
  const written = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-apply]");
    if (!button) return;
    for (const [name, value] of Object.entries(JSON.parse(button.dataset.apply))) {
      const field = form.elements[name];
      if (!field) continue;
      field.closest("details")?.setAttribute("open", "");
      field.value = written(value);
    }
    planSoon();
  });

  // Columns that are chosen become the mapping; a role belongs to one column.
  form.addEventListener("change", (event) => {
    const chosen = event.target.closest("[data-column]");
    if (!chosen) return;
    const roles = $$("[data-column]", chosen.closest("[data-mapping]"));
    for (const other of roles) if (other !== chosen && other.value === chosen.value) other.value = "";
    const pairs = roles.filter((select) => select.value).map((select) => `${select.value}: ${JSON.stringify(select.dataset.column)}`);
    form.elements.data.value = pairs.length ? `{${pairs.join(", ")}}` : "";
    planSoon();
  });

  // The first samples, as the base reads them. They are asked for once for each choice of what they depend on.
  const preview = $("#preview");
  let previewed = "";
  const showSamples = () => {
    const { training_file: file, model, data, method } = form.elements;
    const usable = $("#check-training_file [data-usable]")?.dataset.usable === "yes";
    const asked = new URLSearchParams({ model: model.value, method: method.value, columns: data.value });
    const address = usable && model.value ? `/page/data/${encodeURIComponent(file.value)}/first?${asked}` : "";
    if (address === previewed) return;
    previewed = address;
    preview.hidden = !address;
    preview.textContent = address ? "Reading the file…" : "";
    if (address) htmx.ajax("GET", address, { target: "#preview", swap: "innerHTML" });
  };
  document.addEventListener("htmx:afterSettle", (event) => { if (event.target.id === "plan") showSamples(); });

  // Settings are found by their names and by what they do.
  const wanted = $("[data-find-option]");
  wanted.addEventListener("input", (event) => {
    event.stopPropagation();
    const words = wanted.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const section of $$("[data-section]")) {
      const fields = $$("[data-option]", section);
      for (const field of fields) field.hidden = !words.every((word) => field.dataset.option.includes(word));
      const shown = fields.filter((field) => !field.hidden).length;
      section.hidden = !shown;
      if (words.length) section.open = shown > 0;
      found += shown;
    }
    $("[data-found]").textContent = words.length ? `${found} found` : "";
  });

  // A refusal names a field, which is marked.
  form.addEventListener("htmx:responseError", (event) => {
    try {
      const { param } = JSON.parse(event.detail.xhr.responseText).error;
      const field = param && form.elements[param];
      field?.closest("details")?.setAttribute("open", "");
      field?.setAttribute("aria-invalid", "true");
      field?.focus();
    } catch { /* page.js shows the message */ }
  });

  // A link to a field opens what hides it.
  const aimed = location.hash && $(location.hash, form);
  if (aimed) {
    aimed.closest("details")?.setAttribute("open", "");
    aimed.focus();
  }

  $("[data-drop]").addEventListener("uploaded", ({ detail: file }) => {
    for (const select of $$("[data-files]")) select.options.add(new Option(`${file.filename} · ${file.id.slice(-6)} · just now`, file.id), 1);
    const share = form.elements.validation_split.value;
    const empty = $$("[data-files]").find((select) => !select.value && !(share && select.id === "validation_file"));
    if (empty) {
      empty.value = file.id;
      $("[data-upload-status]").textContent = `${file.filename} uploaded as ${empty.labels[0].textContent.toLowerCase()}.`;
    }
    planSoon();
  });
})();
