/** PNG files that say at what resolution they are and what they show. */

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  let c = n;
  for (let k = 0; k < 8; k++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c >>> 0;
});

function crc(bytes: Uint8Array): number {
  let c = 0xffffffff;
  for (const byte of bytes) c = TABLE[(c ^ byte) & 255] ^ (c >>> 8);
  return (c ^ 0xffffffff) >>> 0;
}

function chunk(type: string, data: Uint8Array): Uint8Array {
  const body = new Uint8Array(4 + data.length);
  body.set(new TextEncoder().encode(type));
  body.set(data, 4);
  const whole = new Uint8Array(body.length + 8);
  const view = new DataView(whole.buffer);
  view.setUint32(0, data.length);
  whole.set(body, 4);
  view.setUint32(body.length + 4, crc(body));
  return whole;
}

/** UTF-8 text under a keyword (iTXt, not compressed). */
function text(keyword: string, value: string): Uint8Array {
  const encoder = new TextEncoder();
  const [name, content] = [encoder.encode(keyword), encoder.encode(value)];
  const data = new Uint8Array(name.length + 5 + content.length);
  data.set(name);
  data.set(content, name.length + 5); // no compression, no language, no translated keyword
  return chunk("iTXt", data);
}

function resolution(dpi: number): Uint8Array {
  const data = new Uint8Array(9);
  const view = new DataView(data.buffer);
  const perMetre = Math.round(dpi / 0.0254);
  view.setUint32(0, perMetre);
  view.setUint32(4, perMetre);
  view.setUint8(8, 1);
  return chunk("pHYs", data);
}

const HEAD = 33; // signature and IHDR

/** The PNG with resolution and texts put behind its head. */
export async function withFacts(png: Blob, dpi: number, texts: Record<string, string>): Promise<Blob> {
  const bytes = new Uint8Array(await png.arrayBuffer());
  const facts = [resolution(dpi), ...Object.entries(texts).map(([keyword, value]) => text(keyword, value))];
  return new Blob([bytes.slice(0, HEAD), ...(facts as Uint8Array<ArrayBuffer>[]), bytes.slice(HEAD)], { type: "image/png" });
}
