// Common to all pages: relative times, the theme, copying, choosing rows, messages, and parts that refresh themselves.
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const words = new Intl.RelativeTimeFormat(undefined, { numeric: "auto", style: "short" });
  const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

  const ago = (seconds) => {
    const size = Math.abs(seconds);
    if (size < 45) return words.format(Math.round(-seconds), "second");
    if (size < 2700) return words.format(Math.round(-seconds / 60), "minute");
    if (size < 79200) return words.format(Math.round(-seconds / 3600), "hour");
    return words.format(Math.round(-seconds / 86400), "day");
  };
  const left = (seconds) => {
    const whole = Math.max(0, Math.round(seconds));
    const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return h ? `${h} h ${m} min` : m ? `${m} min${m < 10 ? ` ${s} s` : ""}` : `${s} s`;
  };
  const showTimes = (root = document) => {
    const now = Date.now();
    for (const node of $$("time[datetime]", root)) {
      const time = new Date(node.dateTime);
      node.title ||= exact.format(time);
      node.textContent = ago((now - time) / 1000);
    }
    for (const node of $$("[data-until]", root)) node.textContent = left((new Date(node.dataset.until) - now) / 1000);
  };

  const say = (text, kind = "bad") => {
    const toast = document.createElement("div");
    toast.className = `toast ${kind}`;
    toast.textContent = text;
    $("#toasts").append(toast);
    setTimeout(() => toast.remove(), kind === "bad" ? 9000 : 3500);
  };
  window.page = { $, $$, say, token: () => JSON.parse(document.body.getAttribute("hx-headers") || "{}") };

  // The theme is the system's unless the reader chooses one.
  const dark = () => (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const themeChanged = () => document.dispatchEvent(new Event("theme"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themeChanged);

  document.addEventListener("click", async (event) => {
    const toggle = event.target.closest("[data-theme-toggle]");
    if (toggle) {
      document.documentElement.dataset.theme = dark() ? "light" : "dark";
      localStorage.setItem("theme", document.documentElement.dataset.theme);
      themeChanged();
    }
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      const source = copy.dataset.copyFrom ? $(copy.dataset.copyFrom).textContent : copy.dataset.copy;
      try { await navigator.clipboard.writeText(source); say("Copied.", "good"); } catch { say("The browser refused to copy."); }
    }
  });
  document.addEventListener("change", (event) => {
    event.target.closest("[data-submit-on-change]")?.requestSubmit();
    if (event.target.matches(".pick input")) showChoice();
  });
  document.addEventListener("reset", () => setTimeout(showChoice));
  // Empty fields of a filter are left out of the address.
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "get") return;
    for (const field of $$("select, input", event.target)) if (!field.value) field.disabled = true;
  });
  addEventListener("pageshow", () => $$("form[method=get] :disabled").forEach((field) => { field.disabled = false; }));

  const showChoice = () => {
    const bar = $(".choice-bar");
    if (!bar) return;
    const count = $$(".pick input:checked").length;
    bar.hidden = count === 0;
    $("[data-chosen]", bar).textContent = `${count} chosen`;
    $("[data-compare]", bar).disabled = count < 2 || count > 8;
  };

  // What a tab keeps, such as a conversation, is for the key that it was signed in with: sessions also end in other tabs, or by time.
  const { who } = document.body.dataset;
  if (who && sessionStorage.getItem("who") !== who) {
    sessionStorage.clear();
    sessionStorage.setItem("who", who);
  }

  // Going back to a list restores the scroll position after the whole list has been loaded.
  const here = `at ${location.pathname}${location.search}`;
  let scrollTarget = performance.getEntriesByType("navigation")[0]?.type === "back_forward" ? Number(sessionStorage.getItem(here)) : 0;
  addEventListener("pagehide", () => sessionStorage.setItem(here, scrollY));
  const restoreScroll = (part) => {
    if (!scrollTarget || part.id !== "jobs") return;
    scrollTo(0, Math.max(scrollY, scrollTarget));
    scrollTarget = 0;
  };

  // Parts refresh themselves only while the page is visible, and continue after a restart of the server.
  document.addEventListener("htmx:beforeRequest", ({ detail }) => { if (detail.requestConfig.path === "/sign-out") sessionStorage.clear(); });
  let lost = false;
  const connection = (gone) => {
    if (gone && !lost) say("The server does not answer. This page continues by itself once it does.");
    if (!gone && lost) say("The server answers again.", "good");
    lost = gone;
  };
  document.addEventListener("htmx:beforeRequest", (event) => {
    if (document.hidden && event.detail.elt.hasAttribute("data-live") && event.detail.requestConfig.verb === "get") event.preventDefault();
  });
  document.addEventListener("htmx:sendError", () => connection(true));
  document.addEventListener("htmx:afterOnLoad", () => connection(false));
  document.addEventListener("htmx:responseError", (event) => {
    connection(false);
    const { status, responseText } = event.detail.xhr;
    if (status === 401) return;
    try { say(JSON.parse(responseText).error.message); } catch { say(`The server answered ${status}.`); }
  });
  document.addEventListener("htmx:afterSettle", (event) => { showTimes(event.target); showChoice(); restoreScroll(event.target); restoreFocus(); });

  // htmx gives the focus back to what has an id. What has none is known by where it leads or what it says.
  let focused = "";
  const marks = ["href", "hx-post", "hx-get", "data-column", "data-copy", "aria-label", "name"];
  const known = (node) => [node.tagName, ...marks.map((mark) => node.getAttribute(mark) ?? ""), node.matches("select") ? "" : node.textContent.trim()].join("\n");
  document.addEventListener("htmx:beforeSwap", () => {
    const node = document.activeElement;
    focused = !node || node === document.body || node.id ? "" : known(node);
  });
  const restoreFocus = () => {
    if (!focused || document.activeElement !== document.body) return;
    const again = $$("a[href], button, select, input, summary, [tabindex]").find((node) => known(node) === focused);
    focused = "";
    again?.focus({ preventScroll: true });
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) showTimes(); });
  showTimes();
  showChoice();
  for (const here of $$(".side nav [aria-current], .tabs [aria-current]")) here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - 60;
  setInterval(showTimes, 5000);
})();
