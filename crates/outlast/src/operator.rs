//! The commands of an operator: list instances, control them, and show what happened. They use the control
//! socket and read the files that instances leave.

pub(crate) mod cluster;
pub(crate) mod doctor;
pub(crate) mod history;
pub(crate) mod instances;
pub(crate) mod post_event;
pub(crate) mod startup;
pub(crate) mod top;
pub(crate) mod upgrade;
