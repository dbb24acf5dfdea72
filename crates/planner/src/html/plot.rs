//! Plots as SVG: lines, and bands on top of each other. What colours mean stands beside them.

use super::colour;
use plotters::{
    coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged},
    prelude::*,
};
use std::ops::Range;

const SIZE: (u32, u32) = (860, 380);
const FONT: (&str, u32) = ("system-ui, sans-serif", 16);
/// About as many ticks stand at an axis.
const TICKS: f64 = 6.0;
/// The most decades that one axis spans.
const DECADES_MAX: f64 = 9.0;

/// Why there is no plot.
#[derive(Debug, thiserror::Error)]
#[error("a plot cannot be drawn: {0}")]
pub struct PlotError(String);

/// An axis.
#[derive(Debug, Clone, Copy)]
pub struct Axis<'a> {
    /// What stands beside it: the quantity and its unit.
    pub name: &'a str,
    /// Whether equal distances are equal factors.
    pub logarithmic: bool,
}

impl<'a> Axis<'a> {
    /// One on which equal distances are equal differences.
    pub fn linear(name: &'a str) -> Self {
        Self { name, logarithmic: false }
    }

    /// One on which equal distances are equal factors.
    pub fn logarithmic(name: &'a str) -> Self {
        Self { name, logarithmic: true }
    }

    fn place(self, value: f64) -> f64 {
        if self.logarithmic { libm::log10(value.max(f64::MIN_POSITIVE)) } else { value }
    }

    fn label(self, place: f64) -> String {
        let value = if self.logarithmic { libm::pow(10.0, place) } else { place };
        let digits = if value == 0.0 || value.abs() >= 9.5 {
            0
        } else {
            (-libm::floor(libm::log10(value.abs()))).max(0.0) as usize
        };
        let text = format!("{value:.*}", digits.max(usize::from(value.abs() < 9.5 && value.fract() != 0.0)));
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    }

    /// From where to where it goes, and its ticks.
    fn scale(self, values: impl Iterator<Item = f64>) -> Scale {
        let kept = values.filter(|value| value.is_finite() && (!self.logarithmic || *value > 0.0));
        let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
        for place in kept.map(|value| self.place(value)) {
            (least, most) = (least.min(place), most.max(place));
        }
        if least > most {
            (least, most) = (0.0, 1.0);
        }
        if self.logarithmic {
            let (first, last) = (libm::floor(least).max(libm::ceil(most) - DECADES_MAX), libm::ceil(most));
            let last = if last <= first { first + 1.0 } else { last };
            let decades = (last - first) as usize;
            let ticks = (0..=decades).map(|decade| first + decade as f64).collect();
            return Scale { range: first..last, ticks };
        }
        let least = least.min(0.0);
        let step = nice_step((most - least).max(f64::MIN_POSITIVE) / TICKS);
        let last = (libm::ceil(most / step) * step).max(least + step);
        let count = ((last - least) / step).round() as usize;
        Scale { range: least..last, ticks: (0..=count).map(|tick| least + tick as f64 * step).collect() }
    }
}

/// 1, 2 or 5 times a power of ten, not below this.
fn nice_step(step: f64) -> f64 {
    let unit = libm::pow(10.0, libm::floor(libm::log10(step)));
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * unit).find(|nice| *nice >= step * 0.999).unwrap_or(step)
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// From left to right.
    pub points: Vec<(f64, f64)>,
    /// Whether its points are marked.
    pub marked: bool,
    /// Its colour, by its number in the legend.
    pub colour: usize,
}

/// One band.
#[derive(Debug, Clone, PartialEq)]
pub struct Band {
    /// Its height at each place.
    pub heights: Vec<f64>,
    /// Its colour, by its number in the legend.
    pub colour: usize,
    /// How light it is, from 0 for as it is to 1 for white: tells bands of one colour apart.
    pub lightness: f64,
}

/// Where values lie on paper, and which of them have a tick.
#[derive(Debug, Clone)]
struct Scale {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for Scale {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (first, last): (i32, i32)) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start);
        first + (f64::from(last - first) * share).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { Vec::new() } else { self.ticks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Scale, Scale>>;

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError(error.to_string())
}

/// Draws on a plane with these axes.
fn draw(
    (x, y): (Axis<'_>, Axis<'_>),
    (x_scale, y_scale): (Scale, Scale),
    paint: impl FnOnce(&mut Chart<'_, '_>) -> Result<(), PlotError>,
) -> Result<String, PlotError> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .margin_right(24)
            .x_label_area_size(46)
            .y_label_area_size(64)
            .build_cartesian_2d(x_scale, y_scale)
            .map_err(failed)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(228, 228, 228))
            .axis_style(RGBColor(120, 120, 120))
            .label_style(FONT)
            .axis_desc_style(FONT)
            .x_desc(x.name)
            .y_desc(y.name)
            .x_label_formatter(&|place| x.label(*place))
            .y_label_formatter(&|place| y.label(*place))
            .draw()
            .map_err(failed)?;
        paint(&mut chart)?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

fn rgb(number: usize, lightness: f64) -> RGBColor {
    let (red, green, blue) = colour(number);
    let lighter = |part: u8| (f64::from(part) + (255.0 - f64::from(part)) * lightness.clamp(0.0, 1.0)) as u8;
    RGBColor(lighter(red), lighter(green), lighter(blue))
}

/// Lines.
pub fn lines(x: Axis<'_>, y: Axis<'_>, series: &[Series]) -> Result<String, PlotError> {
    let all = || series.iter().flat_map(|series| series.points.iter().copied());
    let scales = (x.scale(all().map(|(at, _)| at)), y.scale(all().map(|(_, value)| value)));
    let bottom = scales.1.range.start;
    draw((x, y), scales, |chart| {
        for series in series {
            let colour = rgb(series.colour, 0.0);
            let places: Vec<(f64, f64)> =
                series.points.iter().map(|(at, value)| (x.place(*at), y.place(*value).max(bottom))).collect();
            chart.draw_series(LineSeries::new(places.iter().copied(), colour.stroke_width(2))).map_err(failed)?;
            if series.marked {
                let marks = places.iter().map(|place| Circle::new(*place, 4, colour.filled()));
                chart.draw_series(marks).map_err(failed)?;
            }
        }
        Ok(())
    })
}

/// Bands on top of each other, over these places; a line at `limit`.
pub fn stacked(x: Axis<'_>, y: Axis<'_>, places: &[f64], bands: &[Band], limit: f64) -> Result<String, PlotError> {
    let scales = (x.scale(places.iter().copied()), y.scale(std::iter::once(limit)));
    let (left, right) = (places.first().copied().unwrap_or(0.0), places.last().copied().unwrap_or(1.0));
    draw((x, y), scales, |chart| {
        let mut below = vec![0.0; places.len()];
        for band in bands {
            let above: Vec<f64> = below.iter().zip(&band.heights).map(|(below, height)| below + height).collect();
            let colour = rgb(band.colour, band.lightness);
            for (from, to) in runs(&band.heights) {
                let upper = (from..to).map(|at| (places[at], above[at]));
                let lower = (from..to).rev().map(|at| (places[at], below[at]));
                let outline: Vec<(f64, f64)> = upper.chain(lower).collect();
                chart.draw_series(std::iter::once(Polygon::new(outline, colour.filled()))).map_err(failed)?;
            }
            below = above;
        }
        let line = [(left, limit), (right, limit)];
        chart.draw_series(LineSeries::new(line, BLACK.stroke_width(1))).map_err(failed)?;
        Ok(())
    })
}

/// Where there is something, with one place on each side: from where to where, its end not included.
fn runs(heights: &[f64]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for at in (0..heights.len()).filter(|at| heights[*at] > 0.0) {
        let (from, to) = (at.saturating_sub(1), (at + 2).min(heights.len()));
        match runs.last_mut() {
            Some(last) if last.1 >= from => last.1 = to,
            _ => runs.push((from, to)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_that_span_all_values() {
        let Scale { range, ticks } = Axis::linear("x").scale([3.0, 47.0].into_iter());
        assert_eq!((range, ticks), (0.0..50.0, vec![0.0, 10.0, 20.0, 30.0, 40.0, 50.0]));
        let Scale { range, ticks } = Axis::logarithmic("x").scale([0.02, 47.0, 0.0].into_iter());
        assert_eq!((range, ticks), (-2.0..2.0, vec![-2.0, -1.0, 0.0, 1.0, 2.0]));
        assert_eq!(Axis::logarithmic("x").scale([].into_iter()).ticks.len(), 2);
        for (place, wanted) in [(-2.0, "0.01"), (0.0, "1"), (2.0, "100")] {
            assert_eq!(Axis::logarithmic("x").label(place), wanted);
        }
        for (value, wanted) in [(0.0, "0"), (0.2, "0.2"), (1.5, "1.5"), (30.0, "30")] {
            assert_eq!(Axis::linear("x").label(value), wanted);
        }
    }

    #[test]
    fn a_plot_is_whole_svg_also_without_values() {
        let series = Series { points: vec![(1.0, 0.5), (10.0, 3.0)], marked: true, colour: 0 };
        for series in [vec![], vec![series]] {
            let svg = lines(Axis::logarithmic("a"), Axis::linear("b"), &series).expect("it can be drawn");
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
        }
        let band = Band { heights: vec![0.0, 2.0, 0.0], colour: 1, lightness: 0.2 };
        let svg =
            stacked(Axis::linear("a"), Axis::linear("b"), &[0.0, 1.0, 2.0], &[band], 4.0).expect("it can be drawn");
        assert!(svg.contains("<polygon"), "{svg}");
    }
}
