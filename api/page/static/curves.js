// Curves of one job, live, or of several jobs in one chart. Numbers come from GET /v1/fine_tuning/…/metrics, thinned by the server.
"use strict";
(() => {
  const { $, $$ } = window.page;
  const box = $("#curves");
  const jobs = JSON.parse(box.dataset.jobs);
  const titles = JSON.parse(box.dataset.titles);
  const several = jobs.length > 1;
  const parent = box.dataset.parent ? JSON.parse(box.dataset.parent) : null; // of the model that this job continues: id, title
  const ids = parent ? [...jobs, parent.id] : jobs;
  const POINTS = several ? 400 : 500;
  const EVERY = 4000;
  const CHARTS = [
    { title: "Loss", large: true, log: true, overlay: true, before: "before/valid_loss", lines: [["train_loss", "Training", true], ["valid_loss", "Validation"]] },
    { title: "Mean reward", large: true, overlay: true, lines: [["train_mean_reward", "Training", true], ["valid_mean_reward", "Validation"]] },
    { title: "Accuracy", unit: "share", overlay: true, lines: [["train_mean_token_accuracy", "Training", true], ["valid_mean_token_accuracy", "Validation"]] },
    { title: "Distance from the teacher (nats)", about: "How differently student and teacher continue the same text; 0: alike.", log: true, lines: [["kl/reverse", "KL(student, teacher)", true], ["kl/forward", "KL(teacher, student)", true]] },
    { title: "Gap to the teacher (nats)", about: "How much likelier the teacher finds the answers than the student does.", lines: [["teacher/gap", "Mean of a token", true]] },
    { title: "Agreement with the teacher", about: "How often both find the same token likeliest, and how much of the teacher's probability its top_k tokens hold.", unit: "share", lines: [["teacher/agreement", "Same likeliest token", true], ["teacher/kept", "Probability of the top_k words", true]] },
    { title: "Pairs judged as in the data", about: "How often the better answer of a pair lies above the worse one.", unit: "share", lines: [["rewards/accuracies", "Training", true], ["valid_rewards/accuracies", "Validation"]] },
    { title: "Reward margin", about: "How far better answers lie above worse ones; it grows as the model tells them apart.", lines: [["rewards/margins", "Training", true], ["valid_rewards/margins", "Validation"]] },
    { title: "Distance from the reference (z0, nats)", about: "How far the model has moved from where training began, on mismatched answers.", lines: [["kl", "Mismatched answers", true]] },
    { title: "Tokens of an answer", about: "Answers that grow without better rewards are often padded.", lines: [["completions/mean_length", "Mean", true]] },
    { title: "Distance of sampler and trainer (nats)", about: "Difference between a token's log-probability when it was sampled and when it is learned; small is healthy.", log: true, lines: [["sampler/logprob_gap", "Mean of a token", true]] },
    { title: "Gradient norm", log: true, lines: [["grad_norm", "Before clipping", true]] },
    { title: "Learning rate", lines: [["learning_rate", "Learning rate"]] },
    { title: "Tokens per second", lines: [["tokens_per_second", "All ranks", true]] },
    { title: "GPU memory", unit: "bytes", lines: [["gpu/memory", "The fullest GPU"]] },
    { title: "GPU utilisation", unit: "share", lines: [["gpu/busy", "Mean of the GPUs", true]] },
    { title: "GPU power (W)", lines: [["gpu/watts", "All GPUs", true]] },
  ];
  const query = new URLSearchParams(location.search);
  const view = { time: query.get("axis") === "time", log: query.has("log"), parent: query.get("parent") !== "off", smooth: Math.min(0.98, Number(query.get("smooth")) || 0) };
  let data = new Map();
  let drawn = [];

  const colour = (name, alpha = 1) => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return alpha === 1 ? hex : hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  };
  const short = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1e15) return value.toExponential(1).replace("e+", " e");
    if (size >= 10000) return new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 }).format(value);
    if (size && size < 0.001) return value.toExponential(1).replace("e", " e");
    return String(Number(value.toPrecision(4)));
  };
  const gib = (value) => `${Number((value / 2 ** 30).toPrecision(3))} GiB`;
  const written = (chart, value) => (value == null ? short(value) : chart.unit === "share" ? `${(100 * value).toFixed(1)} %` : chart.unit === "bytes" ? gib(value) : short(value));
  const span = (seconds) => {
    const s = Math.round(seconds);
    if (s < 120) return `${s} s`;
    return s < 7200 ? `${Math.round(s / 6) / 10} min` : `${Math.round(s / 360) / 10} h`;
  };
  const smoothed = (values) => {
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = view.smooth * mean + (1 - view.smooth) * value;
      weight = view.smooth * weight + (1 - view.smooth);
      return mean / weight;
    });
  };

  // One line of a chart: x, y and style. With smoothing, the measured values stay visible as a faint line.
  const linesOf = (chart) => {
    const own = jobs.flatMap((id, nth) => linesOfJob(chart, id, nth));
    own.push(...levelBefore(chart, own));
    if (!own.length || !parent || !view.parent || !chart.overlay) return own;
    const before = linesOfJob(chart, parent.id, 0).filter((line) => !line.faint);
    return [...own, ...before.map((line) => ({ ...line, paint: "--s8", nth: 8, dash: line.second ? [2, 4] : [6, 4], label: `${parent.title}, ${line.label.toLowerCase()}`, points: false }))];
  };
  // The validation loss before training, as a level to compare with: one measured number, drawn over the whole width.
  const levelBefore = (chart, own) => {
    const before = several ? undefined : data.get(jobs[0])?.series[chart.before];
    if (!before || !own.length) return [];
    const ends = [Math.min(...own.map((line) => line.xs[0])), Math.max(...own.map((line) => line.xs.at(-1)))];
    return [{ xs: ends[0] < ends[1] ? ends : ends.slice(1), ys: Array(ends[0] < ends[1] ? 2 : 1).fill(before.values[0]), paint: "--s6", nth: 6, dash: [2, 5], width: 1.4, label: "Before training", points: false }];
  };
  const linesOfJob = (chart, id, nth) => {
    const metrics = data.get(id);
    if (!metrics) return [];
    const began = Math.min(...Object.values(metrics.series).map((one) => one.times[0]));
    return chart.lines.flatMap(([name, label, noisy], place) => {
      const one = metrics.series[name];
      if (!one) return [];
      const xs = view.time ? one.times.map((time) => time - began) : one.steps;
      const ys = view.log && chart.log ? one.values.map((value) => (value > 0 ? value : null)) : one.values;
      const paint = `--s${several ? nth + 1 : place + 1}`;
      const line = { xs, ys, paint, nth: several ? nth + 1 : place + 1, dash: several && place ? [5, 4] : undefined, second: place > 0, width: 1.6, label: several ? titles[nth] : label, points: one.values.length < 40 || place > 0 };
      if (!noisy || !view.smooth) return [line];
      return [{ ...line, faint: true, width: 1 }, { ...line, ys: smoothed(one.values), points: false }];
    });
  };

  // Marks of one job: attempts and pauses as lines, checkpoints as ticks on the axis.
  const drawMarks = (u, large) => {
    const metrics = data.get(jobs[0]);
    if (several || !metrics) return;
    const began = Math.min(...Object.values(metrics.series).map((one) => one.times[0]));
    const { ctx, bbox } = u;
    ctx.save();
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.font = `500 ${11 * devicePixelRatio}px Inter, sans-serif`;
    let edge = -Infinity;
    for (const mark of metrics.marks.toSorted((a, b) => a.step - b.step || a.time - b.time)) {
      if (mark.type === "resume" || (mark.type === "attempt" && mark.label === "1")) continue;
      const x = Math.round(u.valToPos(view.time ? mark.time - began : mark.step, "x", true)) + 0.5;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const paint = colour({ checkpoint: "--s3", pause: "--violet", cancel: "--red" }[mark.type] ?? "--faint");
      ctx.strokeStyle = ctx.fillStyle = paint;
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      if (mark.type === "checkpoint") {
        const y = bbox.top + bbox.height, size = 4 * devicePixelRatio;
        ctx.moveTo(x, y - 2 * size); ctx.lineTo(x - size, y); ctx.lineTo(x + size, y); ctx.fill();
        continue;
      }
      ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.setLineDash([]);
      const words = { attempt: `attempt ${mark.label}`, pause: "paused", cancel: "cancelled" }[mark.type];
      if (large && x > edge) { ctx.fillText(words, x + 5 * devicePixelRatio, bbox.top + 12 * devicePixelRatio); edge = x + ctx.measureText(words).width + 10 * devicePixelRatio; }
    }
    ctx.restore();
  };

  const nearest = (values, place) => {
    for (let back = place; back >= 0; back--) if (values[back] != null) return values[back];
    return null;
  };
  const showKey = (card, u) => {
    const { idx } = u.cursor;
    const place = idx ?? u.data[0].length - 1;
    const at = u.data[0][place];
    const parts = card.lines.flatMap((line, nth) => {
      if (line.faint || (several && line.dash)) return [];
      const mark = document.createElement("i");
      mark.className = `k${line.nth}`;
      const value = document.createElement("b");
      // Of several jobs the table beside tells the results, by a measure of its own.
      value.textContent = several && idx == null ? "" : written(card.chart, nearest(u.data[nth + 1], place));
      const item = document.createElement("span");
      item.append(mark, line.label, " ", value);
      return [item];
    });
    const where = document.createElement("span");
    where.textContent = idx == null ? "" : view.time ? `after ${span(at)}` : `step ${at}`;
    card.key.replaceChildren(...parts, where);
  };

  const options = (card, width, height) => {
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px Inter, sans-serif" };
    const log = view.log && card.chart.log;
    return {
      width, height, legend: { show: false }, padding: [8, 16, 0, 0],
      cursor: { sync: { key: "curves", setSeries: false }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : (u, low, high) => { const pad = (high - low || Math.abs(high) || 1) * 0.06; return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad]; } } },
      axes: [
        { ...axis, size: 28, space: 70, values: (u, at) => at.map((v) => (view.time ? span(v) : Number.isInteger(v) ? short(v) : "")) },
        { ...axis, size: 52, values: (u, at) => at.map((v) => (v == null ? "" : card.chart.unit === "share" ? `${Math.round(100 * v)} %` : card.chart.unit === "bytes" ? gib(v) : short(v))) },
      ],
      series: [{}, ...card.lines.map((line) => ({ stroke: colour(line.paint, line.faint ? 0.28 : 1), width: line.width, dash: line.dash, spanGaps: true, points: { show: line.points && !line.faint, size: 5, fill: colour("--panel") } }))],
      hooks: {
        draw: [(u) => drawMarks(u, card.chart.large)],
        setCursor: [(u) => showKey(card, u)],
        setSelect: [(u) => { card.zoomed = u.select.width > 0; }],
        ready: [(u) => u.over.addEventListener("dblclick", () => { card.zoomed = false; })],
      },
    };
  };

  // What a card shows, as files: numbers as they were measured, whatever the smoothing; the picture with its title and key.
  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const fileName = (card, ending) => `${several ? "compared" : jobs[0]}-${card.chart.title.toLowerCase().replace(/[^a-z]+/g, "-").replace(/-$/, "")}.${ending}`;
  const saveCsv = (card) => {
    const names = card.chart.lines.map(([name]) => name);
    const rows = [["job", "step", "time", ...names]];
    for (const id of card.chart.overlay && view.parent ? ids : jobs) {
      const { series = {} } = data.get(id) ?? {};
      const steps = new Map();
      names.forEach((name, column) => series[name]?.steps.forEach((step, place) => {
        if (!steps.has(step)) steps.set(step, [id, step, new Date(1000 * series[name].times[place]).toISOString(), ...names.map(() => "")]);
        steps.get(step)[3 + column] = series[name].values[place];
      }));
      rows.push(...[...steps.values()].sort((a, b) => a[1] - b[1]));
    }
    save(fileName(card, "csv"), new Blob([rows.map((row) => row.join(",")).join("\n"), "\n"], { type: "text/csv" }));
  };
  const savePng = (card) => {
    const drawing = card.u.ctx.canvas, scale = devicePixelRatio, above = 52 * scale;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [drawing.width, drawing.height + above];
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = colour("--panel");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    const font = (weight) => { ctx.font = `${weight} ${13 * scale}px Inter, sans-serif`; };
    const text = colour("--text");
    font(600);
    ctx.fillStyle = text;
    ctx.fillText(several ? card.chart.title : `${card.chart.title} · ${titles[0]}`, 12 * scale, 20 * scale);
    font(400);
    let x = 12 * scale;
    for (const line of card.lines.filter((one) => !one.faint && !(several && one.dash))) {
      ctx.fillStyle = colour(line.paint);
      ctx.fillRect(x, 34 * scale, 10 * scale, 3 * scale);
      ctx.fillStyle = text;
      ctx.fillText(line.label, x + 15 * scale, 40 * scale);
      x += 31 * scale + ctx.measureText(line.label).width;
    }
    ctx.drawImage(drawing, 0, above);
    canvas.toBlob((blob) => save(fileName(card, "png"), blob));
  };

  const about = (text) => {
    const sentence = document.createElement("p");
    sentence.className = "hint";
    sentence.textContent = text;
    return sentence;
  };

  const newCard = (chart) => {
    const root = document.createElement("section");
    root.className = `curve-card${chart.large ? " large" : ""}`;
    const title = document.createElement("h3");
    title.textContent = several && chart.lines.length > 1 ? `${chart.title} (dashed: validation)` : chart.title;
    const key = document.createElement("div");
    key.className = "key";
    const saves = document.createElement("div");
    saves.className = "saves";
    for (const [format, save] of [["CSV", saveCsv], ["PNG", savePng]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = format;
      button.setAttribute("aria-label", `${chart.title} as ${format}`);
      button.title = format === "CSV" ? `The measured numbers, at most ${POINTS} steps of a line` : "The curve as it is drawn here";
      button.addEventListener("click", () => save(card));
      saves.append(button);
    }
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.tabIndex = 0;
    plot.setAttribute("role", "img");
    root.append(title, saves, ...(chart.about ? [about(chart.about)] : []), key, plot);
    box.append(root);
    const card = { chart, root, key, plot, lines: [], u: null, zoomed: false, shape: "" };
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !card.u) return;
      event.preventDefault();
      const xs = card.u.data[0];
      const place = Math.max(0, Math.min(xs.length - 1, (card.u.cursor.idx ?? xs.length - 1) + by * (event.shiftKey ? 10 : 1)));
      key.setAttribute("aria-live", "polite");
      card.u.setCursor({ left: card.u.valToPos(xs[place], "x"), top: 10 });
    });
    return card;
  };

  // Small curves that are the same for all compared jobs, such as one schedule of the rate, say nothing.
  const allAlike = ({ chart, lines: [first, ...others] }) => several && !chart.large && others.length > 0
    && others.every((line) => line.ys.length === first.ys.length && line.ys.every((value, at) => value === first.ys[at]));

  const draw = (card, rebuild) => {
    card.lines = linesOf(card.chart);
    card.root.hidden = card.lines.length === 0 || allAlike(card);
    if (card.root.hidden) return;
    const table = uPlot.join(card.lines.map((line) => [line.xs, line.ys]));
    const shape = JSON.stringify(card.lines.map(({ paint, label, faint, points }) => [paint, label, faint, points]));
    if (rebuild || !card.u || shape !== card.shape) {
      card.u?.destroy();
      card.u = new uPlot(options(card, card.plot.clientWidth, card.plot.clientHeight), table, card.plot);
      card.shape = shape;
    } else {
      card.u.setData(table, !card.zoomed);
      if (card.zoomed) card.u.redraw();
    }
    showKey(card, card.u);
    const ranges = card.lines.filter((line) => !line.faint).map((line) => `${line.label}: from ${written(card.chart, line.ys[0])} to ${written(card.chart, line.ys.at(-1))}`);
    card.plot.setAttribute("aria-label", `${card.chart.title}. ${ranges.join(". ")}. Left and right move along the curve.`);
  };
  const drawAll = (rebuild = false) => {
    const any = jobs.some((id) => Object.keys(data.get(id)?.series ?? {}).length);
    $("[data-empty]", box).hidden = any;
    if (!drawn.length) drawn = CHARTS.map(newCard);
    drawn.forEach((card) => draw(card, rebuild));
  };

  // The server's numbers; a 304 means that nothing is new.
  const tags = new Map();
  const fetchOne = async (id) => {
    const headers = tags.has(id) ? { "if-none-match": tags.get(id) } : {};
    const answer = await fetch(`/v1/fine_tuning/jobs/${encodeURIComponent(id)}/metrics?points=${POINTS}`, { headers, cache: "no-store" });
    if (answer.status === 304) return false;
    if (!answer.ok) throw new Error(answer.status);
    tags.set(id, answer.headers.get("etag"));
    data.set(id, await answer.json());
    return true;
  };
  const refresh = async () => {
    const older = parent && !data.has(parent.id) ? [fetchOne(parent.id).catch(() => false)] : []; // it is over, or was deleted
    const fresh = await Promise.all([...jobs.map(fetchOne), ...older]);
    if (fresh.includes(true)) drawAll();
    if (!performance.getEntriesByName("curves").length) performance.mark("curves");
  };
  const ended = () => jobs.every((id) => ["succeeded", "failed", "cancelled"].includes(data.get(id)?.status));
  const forever = async () => {
    while (!ended()) {
      if (!document.hidden || !data.size) try { await refresh(); } catch { /* the server does not answer: try again */ }
      await new Promise((resolve) => setTimeout(resolve, ended() ? 0 : EVERY));
    }
  };

  // The controls above the charts, whose values are kept in the address.
  const tools = () => {
    $$("[data-axis]").forEach((button) => button.setAttribute("aria-pressed", String((button.dataset.axis === "time") === view.time)));
    $("[data-log]").setAttribute("aria-pressed", String(view.log));
    $("[data-overlay]")?.setAttribute("aria-pressed", String(view.parent));
    $("[data-smooth]").value = view.smooth;
    $("[data-smooth] + output").textContent = view.smooth ? view.smooth.toFixed(2) : "off";
    const wanted = new URLSearchParams(location.search);
    for (const [name, value] of [["axis", view.time ? "time" : ""], ["log", view.log ? "1" : ""], ["parent", view.parent ? "" : "off"], ["smooth", view.smooth || ""]]) value ? wanted.set(name, value) : wanted.delete(name);
    history.replaceState(null, "", `${location.pathname}${wanted.size ? `?${wanted}` : ""}`);
  };
  const change = (by) => { Object.assign(view, by); tools(); drawn.forEach((card) => { card.zoomed = false; }); drawAll(true); };
  $$("[data-axis]").forEach((button) => button.addEventListener("click", () => change({ time: button.dataset.axis === "time" })));
  $("[data-log]").addEventListener("click", () => change({ log: !view.log }));
  $("[data-overlay]")?.addEventListener("click", () => change({ parent: !view.parent }));
  $("[data-smooth]").addEventListener("input", (event) => change({ smooth: Number(event.target.value) }));
  document.addEventListener("theme", () => drawAll(true));
  let resizing;
  new ResizeObserver(() => { clearTimeout(resizing); resizing = setTimeout(() => drawn.forEach((card) => card.u?.setSize({ width: card.plot.clientWidth, height: card.plot.clientHeight })), 80); }).observe(box);
  tools();
  forever();
})();
