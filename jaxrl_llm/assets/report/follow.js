// Loads the page again when the files of the runs have changed.
setInterval(async () => {
  try {
    const answer = await fetch("/stamp", { cache: "no-store" });
    if (answer.ok && (await answer.text()) !== stamp) location.reload();
  } catch {
    // The server has ended: the page stays as it is.
  }
}, 3000);
