// Logs of a job as its processes print them: a stream that reconnects when it is interrupted.
"use strict";
(() => {
  const { $ } = window.page;
  const MOST = 6000;
  const box = $("#log");
  const follow = $("[data-follow]");
  const find = $("[data-find]");
  let lines = box.textContent.split("\n");
  let last = "";

  const draw = () => {
    const wanted = find.value.toLowerCase();
    const shown = wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines;
    box.textContent = shown.join("\n");
    if (follow.checked) box.scrollTop = box.scrollHeight;
  };
  let due = false;
  const soon = () => {
    if (!due) requestAnimationFrame(() => { due = false; draw(); });
    due = true;
  };
  const add = ({ attempt, source, line }) => {
    const from = `==> attempt ${attempt}, ${source} <==`;
    if (from !== last) lines.push(last = from);
    lines.push(line);
    if (lines.length > MOST) lines = lines.slice(-MOST);
    soon();
  };
  const listen = async () => {
    const answer = await fetch(box.dataset.log);
    if (!answer.ok) throw new Error(answer.status);
    lines = [];
    last = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      parts.filter(Boolean).forEach((part) => add(JSON.parse(part)));
    }
  };
  // The stream ends when the job is paused, too. The head of the page, which refreshes itself, shows when the job goes on.
  const state = () => $("#job-head").dataset.status;
  const change = () => new Promise((resolve) => {
    setTimeout(resolve, 3000);
    document.addEventListener("htmx:afterSettle", resolve, { once: true });
  });
  const forever = async () => {
    for (let first = true; first || !["succeeded", "failed", "cancelled"].includes(state()); first = false) {
      if (first || (state() !== "paused" && !document.hidden)) try { await listen(); } catch { /* the server does not answer, or restarts */ }
      await change();
    }
  };
  find.addEventListener("input", soon);
  follow.addEventListener("change", soon);
  box.addEventListener("wheel", () => { follow.checked = box.scrollHeight - box.scrollTop - box.clientHeight < 40; }, { passive: true });
  draw();
  if (box.dataset.log) forever();
})();
