// Builds plotly.min.js: plotly.js with only the charts of the report, a quarter of the whole. `make plotly` runs it with NODE_MODULES.
// Also writes LICENSES.txt, with the licences of all packages whose code is in it.
import { existsSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const packages = resolve(process.env.NODE_MODULES);
const esbuild = createRequire(join(packages, "x"))("esbuild");
const version = JSON.parse(readFileSync(join(packages, "plotly.js/package.json"))).version;

const entry = `
  const Plotly = require("plotly.js/lib/core"); // with scatter
  Plotly.register([require("plotly.js/lib/bar"), require("plotly.js/lib/icicle")]);
  module.exports = Plotly;`;
const built = await esbuild.build({
  stdin: { contents: entry, resolveDir: dirname(packages) },
  bundle: true, minify: true, format: "iife", globalName: "Plotly", target: "es2020", charset: "utf8",
  define: { global: "window", "define.amd": "false" }, loader: { ".css": "empty" }, legalComments: "none", metafile: true,
  banner: { js: `/* plotly.js ${version} with scatter, bar and icicle only. Copyright Plotly, Inc. and others, MIT and other licences: LICENSES.txt. */` },
  outfile: join(here, "plotly.min.js"),
});

const found = Object.values(built.metafile.outputs).flatMap((output) => Object.entries(output.inputs))
  .filter(([file, { bytesInOutput }]) => bytesInOutput && file.includes("node_modules/"))
  .map(([file]) => file.slice(file.lastIndexOf("node_modules/") + 13).split("/").slice(0, file.includes("node_modules/@") ? 2 : 1).join("/"));
const texts = [...new Set(found)].sort().map((name) => {
  const folder = join(packages, name);
  const { version: its, license } = JSON.parse(readFileSync(join(folder, "package.json")));
  const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
  return `${name} ${its} (${license})\n\n${file && existsSync(join(folder, file)) ? readFileSync(join(folder, file), "utf8").trim() : "See the package's README."}\n`;
});
writeFileSync(join(here, "LICENSES.txt"), texts.join(`\n${"-".repeat(80)}\n\n`));
