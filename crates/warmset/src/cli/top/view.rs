//! How the models are looked at: order, place in the list, and what went wrong last.

use ratatui::crossterm::event::KeyCode;
use serde_json::Value;
use std::cmp::Ordering;

/// What models are sorted by.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    /// The least worth is the next victim.
    #[default]
    Worth,
    Name,
    State,
    Memory,
    Demand,
    Queue,
}

impl Sort {
    /// With the key that chooses it.
    pub(super) const ALL: [(char, Self, &'static str); 6] = [
        ('w', Self::Worth, "worth"),
        ('n', Self::Name, "name"),
        ('s', Self::State, "state"),
        ('m', Self::Memory, "memory"),
        ('d', Self::Demand, "demand"),
        ('u', Self::Queue, "queue"),
    ];

    fn compare(self, left: &Value, right: &Value) -> Ordering {
        let number = |model: &Value, key: &str| model[key].as_f64().unwrap_or(0.0);
        let larger_first = |key: &str| number(right, key).total_cmp(&number(left, key));
        let held = |model: &Value| model["held_bytes"].as_u64().unwrap_or(0);
        let by = match self {
            Self::Worth => larger_first("worth"),
            Self::Name => Ordering::Equal,
            Self::State => left["state"].as_str().cmp(&right["state"].as_str()),
            Self::Memory => held(right).cmp(&held(left)),
            Self::Demand => larger_first("demand_per_second"),
            Self::Queue => waiting(right).cmp(&waiting(left)),
        };
        // What is in memory comes first, then the name decides.
        by.then_with(|| (held(right) > 0).cmp(&(held(left) > 0)))
            .then_with(|| left["name"].as_str().cmp(&right["name"].as_str()))
    }
}

/// Requests that wait for a model, wherever they wait.
pub(super) fn waiting(model: &Value) -> u64 {
    let number = |key: &str| model[key].as_u64().unwrap_or(0);
    number("queued").saturating_add(number("waiting"))
}

/// The state of the screen.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    /// Models above the first one that is shown.
    pub(super) above: usize,
    /// Why the last look at the server failed.
    pub(super) trouble: Option<String>,
    /// Printed, not shown: no keys.
    pub(super) for_paper: bool,
}

impl View {
    /// A key that does not end it.
    pub(super) fn press(&mut self, key: KeyCode) {
        match key {
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char(pressed) => {
                if let Some((_, sort, _)) = Sort::ALL.into_iter().find(|(key, _, _)| *key == pressed) {
                    (self.sort, self.above) = (sort, 0);
                }
            }
            KeyCode::Down => self.above = self.above.saturating_add(1),
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::PageDown => self.above = self.above.saturating_add(10),
            KeyCode::PageUp => self.above = self.above.saturating_sub(10),
            KeyCode::Home => self.above = 0,
            _ => {}
        }
    }

    /// The models in order.
    pub(super) fn ordered<'a>(&self, models: &'a [Value]) -> Vec<&'a Value> {
        let mut models: Vec<&Value> = models.iter().collect();
        models.sort_by(|left, right| self.sort.compare(left, right));
        if self.reversed {
            models.reverse();
        }
        models
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn keys_change_the_order() {
        let models = [
            json!({"name": "b", "worth": 1.0, "held_bytes": 5, "queued": 0}),
            json!({"name": "a", "worth": 3.0, "held_bytes": 9, "queued": 2, "waiting": 1}),
            json!({"name": "c"}),
        ];
        let mut view = View::default();
        let names = |view: &View| -> String {
            view.ordered(&models).iter().filter_map(|model| model["name"].as_str()).collect()
        };
        assert_eq!(names(&view), "abc");
        view.press(KeyCode::Char('r'));
        assert_eq!(names(&view), "cba");
        for (key, _, _) in Sort::ALL {
            view.press(KeyCode::Char(key));
            assert_eq!(names(&view).len(), 3, "{key}");
        }
        view.press(KeyCode::Char('x'));
        assert_eq!(view.sort, Sort::Queue);
        view.press(KeyCode::Down);
        view.press(KeyCode::Up);
        view.press(KeyCode::Up);
        assert_eq!(view.above, 0);
    }
}
