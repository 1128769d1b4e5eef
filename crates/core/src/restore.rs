//! Which interrupted sessions are started again, and in which order. It reads no record and starts no process; the driver
//! does, one session after the other.

use std::fmt;

/// What the record and the registry tell of one session.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub id: String,
    /// Its user ended it.
    pub has_ended: bool,
    /// An outlast with this session runs now.
    pub is_running: bool,
    /// When its record was written, in seconds since 1970.
    pub updated: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection<'a> {
    All,
    One(&'a str),
}

/// The sessions to start, in this order, and those that run already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub start: Vec<String>,
    pub running: Vec<String>,
}

/// Why the one session that was named is not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    Unknown,
    HasEnded,
    IsRunning,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Refused::Unknown => "no session of this id was recorded",
            Refused::HasEnded => "its user ended it",
            Refused::IsRunning => "it is running",
        })
    }
}

/// The session that was used last is the first. With `Selection::All`, sessions that were ended stay ended.
pub fn plan(all: &[Candidate], selection: Selection<'_>) -> Result<Plan, Refused> {
    if let Selection::One(id) = selection {
        return match all.iter().find(|one| one.id == id) {
            None => Err(Refused::Unknown),
            Some(one) if one.is_running => Err(Refused::IsRunning),
            Some(one) if one.has_ended => Err(Refused::HasEnded),
            Some(one) => Ok(Plan { start: vec![one.id.clone()], running: Vec::new() }),
        };
    }
    let mut sorted: Vec<&Candidate> = all.iter().filter(|one| !one.has_ended || one.is_running).collect();
    sorted.sort_by(|one, other| other.updated.total_cmp(&one.updated).then_with(|| one.id.cmp(&other.id)));
    let (running, start): (Vec<&Candidate>, Vec<&Candidate>) = sorted.into_iter().partition(|one| one.is_running);
    let ids = |all: Vec<&Candidate>| all.into_iter().map(|one| one.id.clone()).collect();
    Ok(Plan { start: ids(start), running: ids(running) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_sessions_are_started_and_ended_ones_are_not() {
        let one =
            |id: &str, has_ended, is_running, updated| Candidate { id: id.into(), has_ended, is_running, updated };
        let all = [
            one("old", false, false, 1.0),
            one("ended", true, false, 9.0),
            one("runs", false, true, 5.0),
            one("new", false, false, 7.0),
            one("also-new", false, false, 7.0),
            // A new outlast under an old name has not written its record yet.
            one("again", true, true, 2.0),
        ];
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        #[rustfmt::skip]
        let table = [
            // selection               start                                running
            (Selection::All,          Ok((ids(&["also-new", "new", "old"]), ids(&["runs", "again"])))),
            (Selection::One("old"),   Ok((ids(&["old"]),                    ids(&[])))),
            (Selection::One("ol"),    Err(Refused::Unknown)),
            (Selection::One("ended"), Err(Refused::HasEnded)),
            (Selection::One("runs"),  Err(Refused::IsRunning)),
            (Selection::One("again"), Err(Refused::IsRunning)),
        ];
        for (selection, expected) in table {
            let expected = expected.map(|(start, running)| Plan { start, running });
            assert_eq!(plan(&all, selection), expected, "{selection:?}");
        }
        assert_eq!(plan(&[], Selection::All), Ok(Plan::default()));
    }
}
