// Refreshes the regions of a page, opens dialogs, and posts their forms to the control API.
"use strict";

(() => {
  const state = document.getElementById("live-state");
  const live = document.body.dataset.live;
  let source = null;

  const say = (text) => {
    if (state && state.textContent !== text) state.textContent = text;
  };

  // A region with an open dialog, or in which somebody types or moves by keyboard, waits for the next time.
  const busy = (region) =>
    region.contains(document.activeElement) || region.querySelector("dialog[open], details[open]");

  // `html` is what the server renders into the page, too: it has escaped every text.
  const swap = (id, html) => {
    const region = document.getElementById(id);
    if (region && !busy(region) && region.dataset.shown !== html) {
      const scrolled = [...region.querySelectorAll(".wide")].map((card) => card.scrollLeft);
      region.innerHTML = html;
      region.dataset.shown = html;
      region.querySelectorAll(".wide").forEach((card, nth) => {
        card.scrollLeft = scrolled[nth] || 0;
      });
    }
  };

  const watch = () => {
    if (!live || !window.EventSource || source) return;
    source = new EventSource(live);
    source.onopen = () => say("live");
    source.onmessage = (event) => {
      say("live");
      for (const [id, html] of Object.entries(JSON.parse(event.data))) swap(id, html);
    };
    source.addEventListener("failed", (event) => say("not live: " + event.data));
    source.onerror = () => say(source && source.readyState === EventSource.CLOSED ? "not live: reload the page" : "connecting");
  };

  const rest = () => {
    if (source) source.close();
    source = null;
  };

  document.addEventListener("visibilitychange", () => (document.hidden ? rest() : watch()));
  window.addEventListener("pagehide", rest);
  window.addEventListener("pageshow", watch);

  document.addEventListener("click", (event) => {
    const opens = event.target.closest("[data-dialog]");
    if (opens) {
      const dialog = document.getElementById(opens.dataset.dialog);
      if (dialog) {
        dialog.querySelector(".failed").textContent = "";
        dialog.showModal();
      }
    }
    const closes = event.target.closest("[data-close]");
    if (closes) closes.closest("dialog").close();
  });

  const body = (form) => {
    const fields = JSON.parse(form.dataset.fixed || "{}");
    for (const input of form.querySelectorAll("input")) {
      fields[input.name] = input.type === "number" ? Number(input.value) : input.value;
    }
    return fields;
  };

  // What a problem document says, or the status.
  const problem = async (answer) => {
    try {
      const document = await answer.json();
      return document.detail || document.title || `status ${answer.status}`;
    } catch {
      return `status ${answer.status}`;
    }
  };

  const post = async (form) => {
    const failed = form.querySelector(".failed");
    const button = form.querySelector("button:not([type=button])");
    failed.textContent = "";
    button.disabled = true;
    try {
      const answer = await fetch(form.dataset.post, {
        method: "POST",
        credentials: "same-origin",
        headers: { "content-type": "application/json", accept: "application/json" },
        body: JSON.stringify(body(form)),
      });
      if (answer.ok) {
        form.closest("dialog").close();
        location.reload();
        return;
      }
      failed.textContent = `Not done: ${await problem(answer)}`;
    } catch {
      failed.textContent = "Not done, as far as is known here: the server did not answer. Look before you try again.";
    } finally {
      button.disabled = false;
    }
  };

  document.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-post]");
    if (!form) return;
    event.preventDefault();
    post(form);
  });

  watch();
})();
