/** One slide laid over another: shift, scale and rotation from two places that both show. */

import type { Point } from "./geometry";

/** (x, y) goes to (a x - b y + x0, b x + a y + y0), in level-0 pixels of both slides. */
export interface Similarity {
  a: number;
  b: number;
  x0: number;
  y0: number;
}

/** The similarity that takes two places to two others; null where two of them are one. */
export function similarity([p, q]: readonly Point[], [s, t]: readonly Point[]): Similarity | null {
  const [dx, dy, ex, ey] = [q[0] - p[0], q[1] - p[1], t[0] - s[0], t[1] - s[1]];
  const size = dx * dx + dy * dy;
  const [a, b] = [(ex * dx + ey * dy) / size, (ey * dx - ex * dy) / size];
  if (!Number.isFinite(a + b) || Math.hypot(a, b) < 1e-9) return null;
  return { a, b, x0: s[0] - a * p[0] + b * p[1], y0: s[1] - b * p[0] - a * p[1] };
}

export function moved({ a, b, x0, y0 }: Similarity, [x, y]: Point): Point {
  return [a * x - b * y + x0, b * x + a * y + y0];
}

export function inverse({ a, b, x0, y0 }: Similarity): Similarity {
  const size = a * a + b * b;
  return { a: a / size, b: -b / size, x0: -(a * x0 + b * y0) / size, y0: (b * x0 - a * y0) / size };
}

/** How much larger things are in the second slide. */
export function scaleOf({ a, b }: Similarity): number {
  return Math.hypot(a, b);
}

/** By how many degrees the second slide is turned, clockwise. */
export function turnOf({ a, b }: Similarity): number {
  return (Math.atan2(b, a) * 180) / Math.PI;
}
