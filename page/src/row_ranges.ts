/** Sets of patches as ranges: for questions to the server, and in few letters for links. */

/** Index ranges [start, stop) of the instances that stay. */
export function keptRanges(removed: Uint8Array): [number, number][] {
  const ranges: [number, number][] = [];
  for (let i = 0; i < removed.length; i++) {
    if (removed[i]) continue;
    const last = ranges[ranges.length - 1];
    if (last && last[1] === i) last[1] = i + 1;
    else ranges.push([i, i + 1]);
  }
  return ranges;
}

const MOST = 6000; // letters that a link may spend on a set of patches

/** Gaps and lengths in turn, in base 36; null where a link would become too long. */
export function rowsText(rows: Iterable<number>): string | null {
  const parts: number[] = [];
  let end = 0;
  for (const row of [...rows].sort((a, b) => a - b)) {
    if (parts.length && row === end) parts[parts.length - 1]++;
    else if (row >= end) parts.push(row - end, 1);
    end = row + 1;
  }
  const text = parts.map((part) => part.toString(36)).join(".");
  return text.length > MOST ? null : text;
}

/** The patches of a text; null where it was not made here or has more than a slide can. */
export function rowsIn(text: string, most = 10_000_000): number[] | null {
  if (!/^[0-9a-z]{1,6}(\.[0-9a-z]{1,6})*$/.test(text)) return null;
  const parts = text.split(".").map((part) => parseInt(part, 36));
  const rows: number[] = [];
  let at = 0;
  for (let i = 0; i + 1 < parts.length; i += 2) {
    at += parts[i];
    if (at + parts[i + 1] > most) return null;
    for (let k = 0; k < parts[i + 1]; k++) rows.push(at++);
  }
  return parts.length % 2 ? null : rows;
}

/** The patches that are marked. */
export function rowsOf(mask: Uint8Array): number[] {
  const rows: number[] = [];
  mask.forEach((one, i) => one && rows.push(i));
  return rows;
}
