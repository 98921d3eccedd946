// Preact with htm: markup as template literals, where every value is a text or a property and never markup.
import { Fragment, createElement, render } from "./lib/preact.js";
import htm from "./lib/htm.js";

export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./lib/hooks.js";
export { Fragment, render };
export const html = htm.bind(createElement);
