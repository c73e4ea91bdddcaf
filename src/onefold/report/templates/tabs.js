// Tabs: show one section at a time. Without this script all sections are visible.
const tabs = [...document.querySelectorAll("#tabs a")];
const panels = tabs.map((tab) => document.getElementById(tab.hash.slice(1)));
const bar = document.getElementById("tabs");

const select = (chosen, focus = false) => {
  const stuck = bar.getBoundingClientRect().top <= 0;
  tabs.forEach((tab, i) => {
    tab.setAttribute("aria-selected", String(i === chosen));
    tab.tabIndex = i === chosen ? 0 : -1;
    panels[i].hidden = i !== chosen;
  });
  if (focus) tabs[chosen].focus();
  if (stuck) panels[chosen].scrollIntoView();
};

if (tabs.length > 1) {
  bar.setAttribute("role", "tablist");
  tabs.forEach((tab, i) => {
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", panels[i].id);
    panels[i].setAttribute("role", "tabpanel");
    panels[i].setAttribute("aria-labelledby", tab.id);
    tab.addEventListener("click", (event) => {
      event.preventDefault();
      select(i);
      history.replaceState(null, "", tab.hash);
    });
    tab.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const to = { ArrowRight: i === last ? 0 : i + 1, ArrowLeft: i === 0 ? last : i - 1, Home: 0, End: last }[event.key];
      if (to !== undefined) {
        event.preventDefault();
        select(to, true);
      } else if (event.key === " ") {
        event.preventDefault();
        tab.click();
      }
    });
  });
  select(Math.max(0, tabs.findIndex((tab) => tab.hash === location.hash)));
  addEventListener("beforeprint", () => panels.forEach((panel) => (panel.hidden = false)));
  addEventListener("afterprint", () => select(tabs.findIndex((tab) => tab.tabIndex === 0)));
}
