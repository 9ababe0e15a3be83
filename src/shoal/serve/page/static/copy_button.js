// A button that copies a text, and says so.

import { el, setText } from "./dom.js";

/** text(): what to copy, made when the button is pressed. shown: where the text is shown if the browser refuses to copy. */
export function copyButton(label, text, shown) {
  const said = el("span.dim.said", { role: "status" });
  const button = el("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    const value = text();
    try {
      await navigator.clipboard.writeText(value);
      setText(said, "copied");
    } catch {
      // Browsers copy only on pages over HTTPS or of this machine.
      const area = el("textarea.code", { readonly: true, rows: "10", "aria-label": label });
      area.value = value;
      shown.replaceChildren(area);
      area.focus();
      area.select();
      setText(said, "select and copy it below");
    }
  });
  return el("span.copy", {}, button, said);
}
