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
