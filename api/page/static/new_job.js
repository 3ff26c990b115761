// The form of a new job: uploads with progress, a plan that follows the fields, and refusals at the field that they name.
"use strict";
(() => {
  const { $, $$, say, token } = window.page;
  const form = $("#new");
  const drop = $("[data-drop]");
  const bar = $("progress", drop);
  const status = $("[data-upload-status]", drop);

  let waiting;
  const planSoon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => htmx.trigger("#plan", "plan"), 350);
  };
  form.addEventListener("input", (event) => { event.target.removeAttribute("aria-invalid"); planSoon(); });

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

  const upload = (file) => {
    const request = new XMLHttpRequest();
    const body = new FormData();
    body.append("purpose", "fine-tune");
    body.append("file", file);
    bar.hidden = false;
    request.upload.addEventListener("progress", ({ loaded, total }) => {
      bar.value = loaded / total;
      status.textContent = `${file.name}: ${Math.round((100 * loaded) / total)} %`;
    });
    request.addEventListener("loadend", () => {
      bar.hidden = true;
      let answer;
      try { answer = JSON.parse(request.responseText); } catch { answer = null; }
      if (request.status !== 200) {
        status.textContent = "";
        say(answer?.error?.message ?? "The upload was interrupted. Try again.");
        return;
      }
      for (const select of $$("[data-files]")) select.options.add(new Option(`${answer.filename} · ${answer.id.slice(-6)} · just now`, answer.id), 1);
      const share = form.elements.validation_split.value;
      const empty = $$("[data-files]").find((select) => !select.value && !(share && select.id === "validation_file"));
      if (empty) empty.value = answer.id;
      status.textContent = `${answer.filename} uploaded${empty ? ` as ${empty.labels[0].textContent.toLowerCase()}` : ""}.`;
      planSoon();
    });
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(token())) request.setRequestHeader(name, value);
    request.send(body);
  };
  const uploadAll = (files) => [...files].forEach(upload);
  $("#upload").addEventListener("change", (event) => { uploadAll(event.target.files); event.target.value = ""; });
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") uploadAll(event.dataTransfer.files);
    });
  }
})();
