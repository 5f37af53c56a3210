"use strict";
// A click on a heading, or Enter and Space on it, sorts the rows by its column; empty cells stay last.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.querySelectorAll("thead th")];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [row, keyOf(row.cells[column])]);
      rows.sort(([, one], [, other]) => compare(one, other, up ? 1 : -1));
      body.append(...rows.map(([row]) => row));
    });
  });
}

function keyOf(cell) {
  return cell.dataset.number === undefined ? cell.textContent : Number(cell.dataset.number);
}

function compare(one, other, sign) {
  if (one === "" || other === "") return (one === "") - (other === "");
  if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
  return sign * (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
}
