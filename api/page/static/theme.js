// Runs before the first paint, so that a page does not flash in the other theme.
"use strict";
{
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
