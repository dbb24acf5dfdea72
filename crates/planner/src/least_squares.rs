//! Least squares of relative errors with no part below zero: what the parts of a time are, from times that were measured.
//!
//! With few parts every choice of those that are more than nothing can be tried: each is solved by its normal equations, and
//! the best one whose parts are all positive is the least-squares solution under that condition (Lawson and Hanson, Solving
//! Least Squares Problems, chapter 23).

/// A pivot that is smaller than this says nothing: the samples do not tell these parts apart.
const PIVOT_MIN: f64 = 1e-9;

/// The parts, and the sum of the squared relative errors; none if the samples say nothing. A row has what each part is
/// multiplied with, divided by the time that was measured.
pub(crate) fn fit<const PARTS: usize>(rows: &[[f64; PARTS]]) -> Option<([f64; PARTS], f64)> {
    let scales: [f64; PARTS] =
        core::array::from_fn(|part| rows.iter().map(|row| row[part] * row[part]).sum::<f64>().sqrt());
    (1u32..1 << PARTS)
        .filter_map(|chosen| solve(rows, &scales, chosen))
        .min_by(|(_, error), (_, other)| error.total_cmp(other))
}

/// The parts of a choice, if none of them is below zero, and the sum of the squared errors.
fn solve<const PARTS: usize>(rows: &[[f64; PARTS]], scales: &[f64; PARTS], chosen: u32) -> Option<([f64; PARTS], f64)> {
    let chosen: Vec<usize> = (0..PARTS).filter(|part| chosen & (1 << part) != 0).collect();
    if chosen.iter().any(|part| scales[*part] == 0.0) {
        return None;
    }
    // Columns of length one: seconds of tokens and of whole steps lie nine powers of ten apart.
    let entry = |row: &[f64; PARTS], part: usize| row[part] / scales[part];
    let mut matrix: Vec<Vec<f64>> = Vec::new();
    for left in &chosen {
        let sums = chosen.iter().map(|right| rows.iter().map(|row| entry(row, *left) * entry(row, *right)).sum());
        let mut line: Vec<f64> = sums.collect();
        line.push(rows.iter().map(|row| entry(row, *left)).sum());
        matrix.push(line);
    }
    let scaled = eliminate(matrix)?;
    let mut parts = [0.0; PARTS];
    for (part, value) in chosen.iter().zip(scaled) {
        parts[*part] = value / scales[*part];
    }
    if parts.iter().any(|part| *part < 0.0) {
        return None;
    }
    let error = |row: &[f64; PARTS]| row.iter().zip(&parts).map(|(count, part)| count * part).sum::<f64>() - 1.0;
    Some((parts, rows.iter().map(|row| error(row) * error(row)).sum()))
}

/// Gauss and Jordan's elimination of a symmetric, positive matrix with its right side as the last column.
fn eliminate(mut matrix: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    for column in 0..matrix.len() {
        let pivot = matrix[column][column];
        if pivot < PIVOT_MIN {
            return None;
        }
        for entry in &mut matrix[column] {
            *entry /= pivot;
        }
        let line = matrix[column].clone();
        for (row, other) in matrix.iter_mut().enumerate() {
            let factor = other[column];
            if row != column {
                other.iter_mut().zip(&line).for_each(|(entry, above)| *entry -= factor * above);
            }
        }
    }
    matrix.iter().map(|line| line.last().copied()).collect()
}
