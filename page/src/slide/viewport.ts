/** OpenSeadragon set up for a slide, with or without an image, and its way between planes. */

import { PLACE, rgb } from "../colours";
import OpenSeadragon from "openseadragon";
import { Layout, type Transform } from "../evidence/overlay";
import { tileUrl, type Scores, type SlideInfo } from "../server/api";

export interface Bounds {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** The level-0 rectangle a viewer shows: the image, or the patches with a margin. */
export function canvasBounds(info: SlideInfo, patches: Bounds | null, edge: number): Bounds {
  if (info.image) return { x: 0, y: 0, width: info.image.width, height: info.image.height };
  if (!patches) return { x: 0, y: 0, width: 1000, height: 1000 };
  return { x: patches.x - edge, y: patches.y - edge, width: patches.width + 2 * edge, height: patches.height + 2 * edge };
}

/** The rectangle that holds the image, else the patches of all runs. */
export function wholeBounds(info: SlideInfo, scores: ReadonlyMap<number, Scores>): Bounds {
  const placed = [...scores.values()].filter((each) => each.x && each.set.n).map(Layout.of);
  if (!placed.length) return canvasBounds(info, null, 0);
  const x = Math.min(...placed.map((l) => l.bounds.x));
  const y = Math.min(...placed.map((l) => l.bounds.y));
  const width = Math.max(...placed.map((l) => l.bounds.x + l.bounds.width)) - x;
  const height = Math.max(...placed.map((l) => l.bounds.y + l.bounds.height)) - y;
  return canvasBounds(info, { x, y, width, height }, placed[0].edge);
}

export function fullLevel(bounds: { width: number; height: number }): number {
  return Math.ceil(Math.log2(Math.max(bounds.width, bounds.height, 1)));
}

/** Opens a slide in an element; `minimap` holds the small map of the whole, where there is one. */
export function openViewer(element: HTMLElement, info: SlideInfo, bounds: Bounds, minimap: HTMLElement | null): OpenSeadragon.Viewer {
  if (minimap) Object.assign(minimap.style, minimapSize(bounds));
  return OpenSeadragon({
    element,
    tileSources: [tileSource(info, bounds) as unknown as OpenSeadragon.TileSourceOptions],
    drawer: "canvas",
    showNavigationControl: false,
    showNavigator: minimap !== null,
    navigatorElement: minimap,
    navigatorOpacity: 1,
    navigatorAutoFade: false,
    navigatorBackground: "transparent",
    navigatorBorderColor: "transparent",
    navigatorDisplayRegionColor: rgb(PLACE),
    animationTime: 0.35,
    springStiffness: 9,
    maxZoomPixelRatio: 4,
    minZoomImageRatio: 0.5,
    visibilityRatio: 0.4,
    zoomPerScroll: 1.35,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    gestureSettingsTouch: { clickToZoom: false },
    gestureSettingsPen: { clickToZoom: false },
    keyboardNavEnabled: false,
    imageLoaderLimit: 6,
    maxImageCacheCount: 400,
    tileRetryMax: 4,
    tileRetryDelay: 2500,
  } as OpenSeadragon.Options);
}

/** A minimap of the slide's shape, at most 170 by 84 pixels: it stands below the slide, not over it. */
function minimapSize({ width, height }: Bounds): { width: string; height: string } {
  const scale = Math.min(170 / width, 84 / height);
  return { width: `${Math.max(30, Math.round(width * scale))}px`, height: `${Math.max(30, Math.round(height * scale))}px` };
}

function tileSource(info: SlideInfo, bounds: Bounds): OpenSeadragon.TileSource {
  const level = fullLevel(bounds);
  const source = new OpenSeadragon.TileSource({
    width: bounds.width,
    height: bounds.height,
    tileSize: info.image?.tile_size ?? 256,
    tileOverlap: info.image?.overlap ?? 0,
    minLevel: Math.min(8, level),
    maxLevel: level,
    getTileUrl: (l: number, x: number, y: number) => tileUrl(info.key, l, x, y),
  } as unknown as OpenSeadragon.TileSourceOptions);
  const finest = info.image ? (info.image.finest ?? level) : -1; // exports may leave out the finest levels
  const exists = source.tileExists.bind(source);
  source.tileExists = (l: number, x: number, y: number) => l <= finest && exists(l, x, y);
  return source;
}

/** From level-0 pixels to a viewer's CSS pixels, times `ratio`. */
export function transformOf(viewer: OpenSeadragon.Viewer, bounds: Bounds, ratio = 1): Transform {
  const view = viewer.viewport.getBoundsNoRotate(true);
  const { x: width, y: height } = viewer.viewport.getContainerSize();
  const scale = (width / view.width / bounds.width) * ratio; // the image is one unit wide
  const angle = (viewer.viewport.getRotation(true) * Math.PI) / 180;
  const shift = (from: number, corner: number) => (-from * width * ratio) / view.width - corner * scale;
  return { scale, x: shift(view.x, bounds.x), y: shift(view.y, bounds.y), angle, centre: [(width * ratio) / 2, (height * ratio) / 2] };
}

/** Moves so that a level-0 rectangle fills the view. */
export function show(viewer: OpenSeadragon.Viewer, bounds: Bounds, area: Bounds, immediately = false): void {
  const rectangle = new OpenSeadragon.Rect(
    (area.x - bounds.x) / bounds.width,
    (area.y - bounds.y) / bounds.width,
    area.width / bounds.width,
    area.height / bounds.width,
  );
  viewer.viewport.fitBounds(rectangle, immediately);
}

/** The level-0 place in the middle of a view, and the pixels of the screen per level-0 pixel. */
export interface Middle {
  centre: [number, number];
  scale: number;
}

export function middleOf({ viewport }: OpenSeadragon.Viewer, bounds: Bounds): Middle {
  const { x, y } = viewport.getCenter(true);
  return { centre: [bounds.x + x * bounds.width, bounds.y + y * bounds.width], scale: (viewport.getZoom(true) * viewport.getContainerSize().x) / bounds.width };
}

export function showMiddle({ viewport }: OpenSeadragon.Viewer, bounds: Bounds, { centre: [x, y], scale }: Middle): void {
  viewport.zoomTo((scale * bounds.width) / viewport.getContainerSize().x, undefined, true);
  viewport.panTo(new OpenSeadragon.Point((x - bounds.x) / bounds.width, (y - bounds.y) / bounds.width), true);
}

interface Movable {
  element: HTMLElement;
  viewer: OpenSeadragon.Viewer;
}

/** Makes two panes move together: the one under the pointer leads, frame by frame. */
export function together(a: Movable, b: Movable): void {
  let leader = a;
  const follow = (from: Movable, to: Movable) => {
    if (leader !== from || !to.viewer.viewport || !to.viewer.isOpen()) return;
    const [source, target] = [from.viewer.viewport, to.viewer.viewport];
    target.zoomTo(source.getZoom(true), undefined, true);
    target.panTo(source.getCenter(true), true);
  };
  for (const [from, to] of [[a, b], [b, a]]) {
    const lead = () => (leader = from);
    for (const type of ["pointerenter", "pointerdown", "wheel", "focusin"]) from.element.addEventListener(type, lead, { passive: true });
    from.viewer.addHandler("update-viewport", () => follow(from, to));
  }
  follow(a, b);
}

/** Shows a part of the slide as soon as the viewer can; one that is open may first have to get its new size. */
export function showOnceOpen(viewer: OpenSeadragon.Viewer, bounds: Bounds, area: Bounds, pause: number): void {
  const go = () => viewer.isOpen() && show(viewer, bounds, area, true);
  if (viewer.isOpen()) setTimeout(go, pause);
  else viewer.addOnceHandler("open", () => requestAnimationFrame(go));
}
