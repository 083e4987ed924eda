"use strict";
// Tables sort by the heading that is pressed: numbers by data-sort, the rest by their text; cells without a number stay last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const numeric = head.classList.contains("num");
    const before = head.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : numeric;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    const rows = [...table.tBodies[0].rows].map((row, place) => {
      const cell = row.cells[column];
      return { row, place, key: numeric ? (cell.dataset.sort === undefined ? null : Number(cell.dataset.sort)) : cell.textContent };
    });
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.place - b.place;
      const order = numeric ? a.key - b.key : a.key.localeCompare(b.key);
      return sign * order || a.place - b.place;
    });
    table.tBodies[0].append(...rows.map((item) => item.row));
  }));
}
// Legends show and hide the lines of their group's charts.
for (const button of document.querySelectorAll("[data-toggle]")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    for (const line of button.closest(".group").querySelectorAll(`[data-series="${button.dataset.toggle}"]`)) line.classList.toggle("off", !shown);
  });
}
