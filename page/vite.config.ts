import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { defineConfig, type Plugin } from "vite";

const here = import.meta.dirname;

/** Puts the licences of the bundled packages beside the page. */
function licences(): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const text = readFileSync(resolve(here, "node_modules/openseadragon/LICENSE.txt"), "utf8");
      const source = `This page bundles OpenSeadragon (https://openseadragon.github.io):\n\n${text}`;
      this.emitFile({ type: "asset", fileName: "LICENSES.txt", source });
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [licences()],
  build: {
    outDir: resolve(here, "../src/xmil/viewer/static"),
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    chunkSizeWarningLimit: 1000,
    rolldownOptions: { input: [resolve(here, "index.html"), resolve(here, "study.html")] },
  },
});
