// A question before something that cannot be taken back.

import { el } from "./dom.js";

/** Ask; resolves to whether the answer was `verb`. Escape means no. */
export function confirmed(question, verb) {
  return new Promise((resolve) => {
    const no = el("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel");
    const yes = el("button.primary", { type: "button", on: { click: () => dialog.close(verb) } }, verb);
    const words = el("p", { id: "question" }, question);
    const dialog = el("dialog", { "aria-labelledby": "question" }, words, el("div.row", {}, no, yes));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === verb);
    });
    document.body.append(dialog);
    dialog.showModal();
    no.focus();
  });
}
