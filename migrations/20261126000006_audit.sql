-- The audit by subject: `springtide audit list --subject`, and the newest row about each run when `springtide audit verify`
-- compares the tables with the audit.
create index audit_by_subject on audit (subject, id);
