//! What a scenario says of loads at a time: how long they take, and whether they fail.

use super::scenario::Pool;

const HOUR_SECONDS: f64 = 3_600.0;

impl Pool {
    /// How long a load takes that begins so many seconds after the beginning and would take so long alone. A disk that is
    /// slow for a while does the rest at its own speed.
    pub(super) fn load_seconds(&self, from: f64, load_seconds: f64) -> f64 {
        let (mut at, mut left) = (from, load_seconds);
        while left > 0.0 {
            let times = self.slowness(at);
            let change = self.next_change(at);
            let whole = left * times;
            if at + whole <= change {
                return at + whole - from;
            }
            left -= (change - at) / times;
            at = change;
        }
        at - from
    }

    fn slowness(&self, at: f64) -> f64 {
        let slow = self.slow_disk.iter().filter(|slow| during(at, slow.at_hours, slow.seconds));
        slow.map(|slow| slow.times).product()
    }

    /// When the disk becomes slow or fast next.
    fn next_change(&self, at: f64) -> f64 {
        let begins = |hours: f64| hours * HOUR_SECONDS;
        let changes = self.slow_disk.iter().flat_map(|slow| {
            let begin = begins(slow.at_hours);
            [begin, begin + slow.seconds]
        });
        changes.filter(|change| *change > at).fold(f64::INFINITY, f64::min)
    }

    /// The chance that a load fails that begins so many seconds after the beginning.
    pub(super) fn failing_share(&self, from: f64) -> f64 {
        let failing = self.failing_loads.iter().filter(|failing| during(from, failing.at_hours, failing.seconds));
        1.0 - failing.map(|failing| 1.0 - failing.share).product::<f64>()
    }
}

fn during(at: f64, from_hours: f64, seconds: f64) -> bool {
    (0.0..seconds).contains(&(at - from_hours * HOUR_SECONDS))
}

#[cfg(test)]
mod tests {
    use super::super::scenario::{FailingLoads, Plan, SHIPPED, SlowDisk};
    use super::*;

    fn pool() -> Pool {
        Plan::parse(SHIPPED.1).expect("it is shipped").pool
    }

    #[test]
    fn a_slow_disk_slows_the_part_of_a_load_that_falls_into_its_time() {
        let slow_disk = vec![SlowDisk { at_hours: 1.0, seconds: 100.0, times: 4.0 }];
        let pool = Pool { slow_disk, ..pool() };
        for (from, wanted) in [(0.0, 20.0), (3_590.0, 50.0), (3_600.0, 80.0), (3_690.0, 27.5), (3_700.0, 20.0)] {
            let seconds = pool.load_seconds(from, 20.0);
            assert!((seconds - wanted).abs() < 1e-9, "{from}: {seconds}");
        }
    }

    #[test]
    fn chances_to_fail_add_up_like_chances() {
        let failing = |share| FailingLoads { at_hours: 0.0, seconds: 10.0, share };
        let pool = Pool { failing_loads: vec![failing(0.5), failing(0.5)], ..pool() };
        assert!((pool.failing_share(5.0) - 0.75).abs() < 1e-12);
        assert!(pool.failing_share(10.0).abs() < 1e-12);
    }
}
