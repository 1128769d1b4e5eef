//! The viewers of a terminal as saved state. Their connections and queues belong to the driver.

use std::{collections::BTreeMap, time::Instant};

use serde::{Deserialize, Serialize};

use super::{Delivery, Role, Size, Terminal, Viewer};
use crate::saved::Moment;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    size: Size,
    viewers: BTreeMap<u64, SavedViewer>,
    activity: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct SavedViewer {
    role: Role,
    size: Size,
    way: Delivery,
    active: u64,
    is_dirty: bool,
    is_busy: bool,
    painted: Option<Moment>,
    misses_below: bool,
}

impl Terminal {
    pub fn save(&self, now: Instant) -> Saved {
        let viewers = self.viewers.iter().map(|(key, viewer)| {
            let saved = SavedViewer {
                role: viewer.role,
                size: viewer.size,
                way: viewer.way,
                active: viewer.active,
                is_dirty: viewer.is_dirty,
                is_busy: viewer.is_busy,
                painted: viewer.painted.map(|at| Moment::of(at, now)),
                misses_below: viewer.misses_below,
            };
            (*key, saved)
        });
        Saved { size: self.size, viewers: viewers.collect(), activity: self.activity }
    }

    pub fn restore(saved: Saved, now: Instant) -> Terminal {
        let viewers = saved.viewers.into_iter().map(|(key, viewer)| {
            let restored = Viewer {
                role: viewer.role,
                size: viewer.size,
                way: viewer.way,
                active: viewer.active,
                is_dirty: viewer.is_dirty,
                is_busy: viewer.is_busy,
                painted: viewer.painted.map(|at| at.at(now)),
                misses_below: viewer.misses_below,
            };
            (key, restored)
        });
        Terminal { size: saved.size, viewers: viewers.collect(), activity: saved.activity }
    }
}
