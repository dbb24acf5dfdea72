//! Reports as one file of HTML that needs nothing else: tables, and plots drawn as SVG into it.

mod page;
mod plot;

pub use page::{Page, seconds_text};
pub use plot::{Axis, Band, PlotError, Series, lines, stacked};

/// Colours that most people can tell apart (Okabe and Ito 2008), a brown in the place of yellow, which does not show on white.
const COLOURS: [(u8, u8, u8); 8] = [
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (60, 60, 60),
    (140, 86, 75),
];

/// The colour of the so-manieth of several.
pub(crate) fn colour(number: usize) -> (u8, u8, u8) {
    COLOURS[number % COLOURS.len()]
}
