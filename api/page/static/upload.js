// Uploads of data files with progress, by dropping or choosing them: on the form of a new job, and on the list of files.
"use strict";
(() => {
  const { $, say, token } = window.page;
  const drop = $("[data-drop]");
  const bar = $("progress", drop);
  const status = $("[data-upload-status]", drop);

  // Each file that has arrived is told by an event `uploaded`; its answer is the API's view of the file.
  const upload = (file) => new Promise((done) => {
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
      if (request.status === 200) {
        status.textContent = `${answer.filename} uploaded.`;
        drop.dispatchEvent(new CustomEvent("uploaded", { detail: answer }));
      } else {
        status.textContent = "";
        say(answer?.error?.message ?? "The upload was interrupted. Try again.");
      }
      done(request.status === 200 ? answer : null);
    });
    request.open("POST", "/v1/files");
    for (const [name, value] of Object.entries(token())) request.setRequestHeader(name, value);
    request.send(body);
  });
  const uploadAll = async (files) => {
    const answers = await Promise.all([...files].map(upload));
    const arrived = answers.filter(Boolean);
    // On the list, one file is shown, with what is wrong in it; of several the list is.
    if ("listed" in drop.dataset && arrived.length === answers.length) location.assign(arrived.length === 1 ? `/data/${encodeURIComponent(arrived[0].id)}` : "/data");
  };
  $("#upload").addEventListener("change", (event) => { uploadAll([...event.target.files]); event.target.value = ""; });
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") uploadAll([...event.dataTransfer.files]);
    });
  }
})();
