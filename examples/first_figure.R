# The first figure of a report, from the files of a run alone: observed against predicted with 95 % intervals.
#
#   Rscript examples/first_figure.R results/first first.png
#
# Needs the package jsonlite. predictions.csv has a row for every held-out row of a simulated run: target, mean and sd in
# units of the target, and low and high, the ends of the interval, where the target was transformed.

words <- commandArgs(trailingOnly = TRUE)
if (length(words) < 1) stop("usage: Rscript first_figure.R RUN [OUTPUT.png]")
run <- words[1]
output <- if (length(words) > 1) words[2] else "first_figure.png"

rows <- read.csv(file.path(run, "predictions.csv"), colClasses = c(site = "character"))
target <- "the target"
described <- file.path(run, "posterior.json") # methods whose sites predict alone write none
if (file.exists(described)) target <- jsonlite::fromJSON(described)$schema$target$name

if (!"mean" %in% names(rows)) stop("a run with classes has probabilities: see the column `probability`")
if (!"low" %in% names(rows)) {
  half <- qnorm(0.975) * rows$sd
  rows$low <- rows$mean - half
  rows$high <- rows$mean + half
}
inside <- rows$low <= rows$target & rows$target <= rows$high

png(output, width = 1200, height = 1000, res = 180)
par(mar = c(4.2, 4.2, 2, 1), las = 1)
plot(rows$mean, rows$target,
  type = "n", xlab = paste("predicted", target), ylab = paste("observed", target),
  ylim = range(rows$low, rows$high, rows$target), bty = "l"
)
segments(rows$mean, rows$low, rows$mean, rows$high, col = "#bcd3e8", lwd = 1.6)
abline(0, 1, col = "#3d3d3d")
points(rows$mean, rows$target, pch = ifelse(inside, 19, 17), cex = 0.6, col = ifelse(inside, "#1f5f99", "#b3261e"))
legend("topleft", c("inside its 95 % interval", "outside"), pch = c(19, 17), col = c("#1f5f99", "#b3261e"), bty = "n")
title(sprintf("%.1f %% of %d rows inside", 100 * mean(inside), nrow(rows)), cex.main = 0.9)
invisible(dev.off())
cat(sprintf("%s: %.4f RMSE, %.1f %% inside, %d rows\n", output, sqrt(mean((rows$mean - rows$target)^2)),
  100 * mean(inside), nrow(rows)))
