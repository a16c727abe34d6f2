const main = document.getElementById("main");
if (planner.setting) startPlan(main);
if (profile !== null) startProfile(main);
