// A conversation with one model or two: each has its own thread, and answers are streamed from POST /v1/chat/completions.
"use strict";
(() => {
  const { $, $$, say, token } = window.page;
  const [who, form, words, log] = [$("#who"), $("#ask"), $("#words"), $("#talk")];
  const KEPT = "messages";
  const [MOST, MOST_BYTES] = [10, 10 * 1024 ** 2];
  let turns = [];
  let pictures = [];
  let stopping = null;

  const element = (name, className, text = "") => {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return made;
  };
  const chosen = () => [...new Set([who.elements.model.value, who.elements.beside.value].filter(Boolean))];
  const keep = () => { try { sessionStorage.setItem(KEPT, JSON.stringify(turns)); } catch { /* too long to keep: it is still here */ } };

  const pictured = ({ url, name }) => {
    const image = element("img", "");
    image.src = url;
    image.alt = name;
    return image;
  };
  const listed = (shown) => {
    const list = element("ul", "");
    list.append(...shown.map((one) => { const item = element("li", ""); item.append(pictured(one)); return item; }));
    return list;
  };

  // A turn: the message with its pictures {url, name}, and each model's answer {text, note, whole}.
  const draw = (turn) => {
    const box = element("section", "turn");
    const answers = element("div", "answers");
    const message = element("div", "message", turn.message);
    if (turn.pictures?.length) message.prepend(listed(turn.pictures));
    box.append(message, answers);
    for (const [model, answer] of Object.entries(turn.answers)) {
      const one = element("article", "answer");
      one.append(element("h2", "mono", model), element("p", "text", answer.text), element("p", "sub", answer.note));
      answers.append(one);
    }
    $("[data-nothing]").hidden = true;
    log.append(box);
    return box;
  };
  const show = (box, place, answer) => {
    const one = $$(".answer", box)[place];
    const atEnd = innerHeight + scrollY > document.documentElement.scrollHeight - 160;
    $(".text", one).textContent = answer.text;
    $(".sub", one).textContent = answer.note;
    $(".sub", one).classList.toggle("fault-text", answer.fault === true);
    if (atEnd) scrollTo(0, document.documentElement.scrollHeight);
  };

  const asked = ({ message, pictures: shown }) => ({
    role: "user",
    content: shown?.length ? [...shown.map(({ url }) => ({ type: "image_url", image_url: { url } })), { type: "text", text: message }] : message,
  });
  // The messages that a model gets: with its own complete answers only.
  const before = (model, until) => {
    const earlier = turns.slice(0, turns.indexOf(until)).filter((turn) => turn.answers[model]?.whole);
    const system = $("#system").value.trim();
    const thread = earlier.flatMap((turn) => [asked(turn), { role: "assistant", content: turn.answers[model].text }]);
    return [...(system ? [{ role: "system", content: system }] : []), ...thread, asked(until)];
  };
  const pause = (seconds, signal) => new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });

  const read = async (response, answer, changed) => {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The answer was interrupted.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.filter((one) => one.startsWith("data: "))) {
        if (line === "data: [DONE]") return;
        const part = JSON.parse(line.slice(6));
        if (part.error) throw new Error(part.error.message);
        if (part.usage) answer.tokens = part.usage.completion_tokens;
        const choice = part.choices?.[0];
        answer.thought = (answer.thought ?? "") + (choice?.delta?.reasoning_content ?? "");
        answer.text += choice?.delta?.content ?? "";
        for (const call of choice?.delta?.tool_calls ?? []) answer.text += `${call.function.name}(${call.function.arguments})`;
        if (choice?.finish_reason === "length") answer.cut = true;
        if (!part.usage) answer.note = answer.text ? "" : answer.thought && `Thinking: ${answer.thought.slice(-200)}`;
        changed();
      }
    }
  };

  // One model's answer. While training holds the slots, the request is repeated when the server says so.
  const ask = async (turn, model, changed, begun, signal) => {
    const answer = turn.answers[model];
    const body = { model, messages: before(model, turn), stream: true, stream_options: { include_usage: true }, temperature: Number($("#temperature").value), max_completion_tokens: Number($("#longest").value) };
    for (;;) {
      const response = await fetch("/v1/chat/completions", { method: "POST", headers: { "content-type": "application/json", ...token() }, body: JSON.stringify(body), signal });
      if (response.ok) {
        const since = performance.now();
        begun();
        answer.note = "";
        await read(response, answer, changed);
        answer.whole = true;
        const seconds = (performance.now() - since) / 1000;
        answer.note = `${answer.tokens ?? "?"} tokens in ${seconds.toFixed(1)} s${answer.text ? "" : ", thoughts only"}${answer.cut ? ", cut off: set longer answers above, under sampling" : ""}`;
        return;
      }
      const { message } = (await response.json().catch(() => ({}))).error ?? { message: `The server answered ${response.status}.` };
      const wait = Number(response.headers.get("retry-after"));
      if (response.status !== 503 || !wait) throw new Error(message);
      for (let left = wait; left > 0; left--) {
        answer.note = `${message.replace(/ Try again\.$/, "")} Trying again in ${left} s.`;
        changed();
        await pause(1, signal);
      }
      answer.note = "Trying again…";
      changed();
    }
  };

  const send = async () => {
    const message = words.value.trim();
    if (!message || stopping) return;
    const models = chosen();
    const turn = { message, pictures, answers: Object.fromEntries(models.map((model) => [model, { text: "", note: "Waiting for the model…" }])) };
    turns.push(turn);
    words.value = "";
    pictures = [];
    drawPictures();
    const box = draw(turn);
    box.scrollIntoView({ block: "end" });
    stopping = new AbortController();
    busy(true);
    // The second request waits for the first answer to begin, so that the first model's stored formats are loaded.
    let go;
    const first = new Promise((resolve) => { go = resolve; });
    await Promise.all(models.map(async (model, place) => {
      const answer = turn.answers[model];
      const changed = () => show(box, place, answer);
      try {
        if (place) await first;
        await ask(turn, model, changed, go, stopping.signal);
      } catch (error) {
        answer.fault = !stopping.signal.aborted;
        answer.note = answer.fault ? error.message : "Stopped.";
      } finally {
        go();
        changed();
      }
    }));
    stopping = null;
    busy(false);
    keep();
  };
  const busy = (is) => {
    log.setAttribute("aria-busy", String(is));
    $("[data-stop]").hidden = !is;
    $("[data-send]").hidden = is;
  };

  const drawPictures = () => {
    const list = $("#shown");
    list.hidden = !pictures.length;
    list.replaceChildren(...listed(pictures).children);
    [...list.children].forEach((item, place) => {
      const remove = element("button", "", "Remove");
      remove.type = "button";
      remove.setAttribute("aria-label", `Remove ${pictures[place].name}`);
      remove.addEventListener("click", () => { pictures = pictures.filter((_, at) => at !== place); drawPictures(); words.focus(); });
      item.append(remove);
    });
  };
  const read64 = (file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve({ url: reader.result, name: file.name }));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
  $("#picture").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    event.target.value = ""; // the same file may be chosen again
    for (const file of files) {
      if (pictures.length === MOST) say(`A message may show ${MOST} images.`);
      else if (file.size > MOST_BYTES) say(`${file.name} is larger than 10 MiB: make it smaller.`);
      else {
        try { pictures = [...pictures, await read64(file)]; } catch { say(`${file.name} could not be read.`); }
      }
    }
    drawPictures();
    words.focus();
  });

  form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
  words.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("[data-stop]").addEventListener("click", () => { stopping?.abort(); words.focus(); });
  $("[data-restart]").addEventListener("click", () => {
    stopping?.abort();
    turns = [];
    sessionStorage.removeItem(KEPT);
    $$(".turn", log).forEach((box) => box.remove());
    $("[data-nothing]").hidden = false;
    words.focus();
  });
  who.addEventListener("change", () => {
    const wanted = new URLSearchParams(new FormData(who));
    if (!wanted.get("beside")) wanted.delete("beside");
    history.replaceState(null, "", `/try?${wanted}`);
  });
  try { turns = JSON.parse(sessionStorage.getItem(KEPT)) ?? []; } catch { say("The previous conversation could not be read."); }
  turns.forEach(draw);
  words.focus();
})();
